"""`aegis plan`: how few GPUs serve a workload, found by simulation.

The command line calls it.
"""
