"""The configuration: the file, the options and variables of `aegis launch`, API keys, and the parsers of their values.

Commands and the launcher read it; the processes that the launcher starts get what they need of it as settings.
"""
