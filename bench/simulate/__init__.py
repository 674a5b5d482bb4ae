"""`aegis simulate`: policies over workloads on simulated GPUs, point by point, and the figures of the papers."""
