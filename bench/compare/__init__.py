"""`aegis bench compare`: runs of one workload side by side, metric by metric.

The command line calls it, and the report shows its table.
"""
