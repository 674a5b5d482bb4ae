"""The core of prefill instances: a queue of groups and one prefill at a time; and the worker that runs prefills.

`aegis.instance` and `aegis.sim` drive the core; its policies are in `policies/`.
"""
