"""`aegis lab`: instruments for those who develop aegis, which measure one mechanism each.

The command line calls `commands`; results are stored in `bench/results`.
"""
