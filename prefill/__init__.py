"""The core of prefill instances: a queue of groups and one step at a time.

`aegis.instance` and `aegis.sim` drive the core; its policies are in `policies/`.
"""
