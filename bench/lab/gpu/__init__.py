"""The speed of a GPU beside the limits of its hardware: moving memory, activating models, decoding. Never run on a GPU.

`bench.lab.commands` calls it.
"""
