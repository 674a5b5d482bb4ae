"""The demo market: eight tiny models that are trained on the user's machine and kept in the cache directory.

`aegis demo` and the launcher make it.
"""
