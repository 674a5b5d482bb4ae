"""Simulated faults: the cores that serve, on pretended devices, with everything going wrong by chance from one seed.

`aegis simulate --faults` and the tests run it.
"""
