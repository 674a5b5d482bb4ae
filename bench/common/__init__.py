"""Parts that several benchmarks share: a figure and its bar, the machine, result files and the tables made of them.

The suites of `bench` and `docs/generate.py` use it.
"""
