"""`aegis calibrate`: from the spans and records of a server to what its steps, copies and messages cost.

The simulator reads the cost file that it writes; `bench.fidelity` and `bench.rivals` calibrate too.
"""
