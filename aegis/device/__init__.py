"""Devices: physical pages, virtual ranges, streams and copies, behind one protocol that `cpu/` and `cuda/` implement.

The node opens the pool of a device, an instance opens the device; `memory` counts what they hold.
"""
