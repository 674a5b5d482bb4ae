"""The speed of KV transfers between the nodes of a Ray cluster: `aegis lab handover`.

`bench.lab.commands` calls it.
"""
