"""The core of decode and mixed instances: batches, their turns, the KV they swap; and the worker that runs the steps.

`aegis.instance` and `aegis.sim` drive the core; its policies are in `policies/`.
"""
