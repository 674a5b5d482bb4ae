"""`aegis bench report` and `aegis bench timeline`: the files of runs as one HTML page and as a trace.

The command line calls it, and `bench.plan` takes `usage` from it.
"""
