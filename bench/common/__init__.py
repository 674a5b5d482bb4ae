"""Parts that several benchmarks share: a figure and its bar, the machine, result files and the code they are of.

All rooms of `bench` use it.
"""
