"""Workloads: which model is called when, and with how many tokens; generators, lengths and traces.

`bench.serve`, `bench.simulate` and the suites that run live draw their requests from it.
"""
