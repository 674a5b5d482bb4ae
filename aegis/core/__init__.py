"""The vocabulary of the system: ids, events, effects, messages, requests, models, errors and latency estimators.

Every other room imports it; it imports none of them.
"""
