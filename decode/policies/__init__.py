"""Policies of decode and mixed instances, one per file: which batch has the next turn, and for how long.

`aegis.policies` lists them by name.
"""
