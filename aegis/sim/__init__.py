"""The simulator: the cores and policies that serve, on simulated GPUs, in simulated time.

`bench.simulate`, `bench.plan` and `bench.fidelity` run it; nothing that serves imports it.
"""
