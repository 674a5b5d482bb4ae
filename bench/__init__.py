"""Tools to measure servers: load generator, comparison, reports, simulation, planning, calibration; `lab/` is our own.

Only the command line calls it.
"""
