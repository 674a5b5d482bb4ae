"""Registration: from the checkpoint that a user names to a weight image that any instance can bind.

The node runs it in a process of its own, and commands use it to look at sources and the cache.
"""
