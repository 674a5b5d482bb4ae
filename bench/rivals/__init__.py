"""`aegis bench rivals`: switching after any token, switching after whole requests, and dedicated instances, live.

The command line calls it.
"""
