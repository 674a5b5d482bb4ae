"""`aegis simulate`: policies over workloads on simulated GPUs, point by point, and the figures of the papers.

The command line calls it; `bench.plan` uses its options and workers.
"""
