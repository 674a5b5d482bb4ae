"""Policies of prefill instances, one per file: where a request is queued, and which job is prefilled next.

`aegis.policies` lists them by name.
"""
