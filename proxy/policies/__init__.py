"""Policies of placement, one per file: which instances the requests of a model go to, and what moves between them.

`aegis.policies` says which scheduler has which.
"""
