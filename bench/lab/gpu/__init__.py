"""What a GPU does, beside the limits of the hardware: moving memory, activating models, decoding. Never run on a GPU.

`bench.lab.commands` calls it.
"""
