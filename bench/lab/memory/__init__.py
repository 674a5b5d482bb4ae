"""The cost of memory on the CPU device, and how well it is shared: `aegis lab memory`.

`bench.lab.commands` calls it.
"""
