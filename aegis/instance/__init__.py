"""The process of an instance: its main loop, the executor of its core's effects, and its tensor-parallel ranks.

The node has it forked (`aegis.process.fork_server`), to run as `python -m aegis.instance.process` would.
"""
