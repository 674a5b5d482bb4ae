"""Suites that compare policies cell by cell, and the search for the most models or the fewest GPUs.

`bench.simulate` calls it, and `bench.plan` uses the search.
"""
