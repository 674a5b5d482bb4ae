"""`aegis bench serve`: sends a workload to any server with OpenAI's API and measures the replies.

The command line calls it; calibration, `bench.fidelity` and `bench.rivals` use it as their client.
"""
