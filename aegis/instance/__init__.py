"""The process of an instance: its main loop, the executor of its core's effects, and its tensor-parallel ranks.

The node starts the process with `python -m aegis.instance.process`.
"""
