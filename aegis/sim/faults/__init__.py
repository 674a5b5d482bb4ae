"""Simulated faults: the cores that serve, on devices made of dictionaries, while everything goes wrong by chance.

`aegis simulate --faults` and the tests run it.
"""
