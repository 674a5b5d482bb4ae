"""`aegis plan`: how few GPUs serve a workload, and what becomes of it there with more traffic, by simulation.

The command line calls it.
"""
