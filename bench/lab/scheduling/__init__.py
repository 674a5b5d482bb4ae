"""The time of decisions and simulations: `aegis lab schedule` and `aegis lab simulator`.

`bench.lab.commands` calls it.
"""
