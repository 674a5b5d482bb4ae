"""`aegis bench report` and `aegis bench timeline`: the files of runs as one HTML page and as a trace.

The command line calls it; `bench.simulate` and `bench.plan` use its plots and numbers.
"""
