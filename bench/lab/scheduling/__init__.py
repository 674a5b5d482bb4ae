"""How long decisions and simulations take: `aegis lab schedule` and `aegis lab simulator`.

`bench.lab.commands` calls it.
"""
