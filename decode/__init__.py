"""The core of decode and mixed instances: batches, their turns, and the KV they swap.

`aegis.instance` and `aegis.sim` drive the core; its policies are in `policies/`.
"""
