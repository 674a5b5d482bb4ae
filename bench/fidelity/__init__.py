"""`aegis bench fidelity`: how far a simulation is from a live run of the same requests.

The command line calls it.
"""
