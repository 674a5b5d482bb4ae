"""The CPU device: memory of the operating system and threads that behave like the memory and streams of a GPU.

`aegis.device.open_device` opens it.
"""
