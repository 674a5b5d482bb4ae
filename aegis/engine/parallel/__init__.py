"""Tensor parallelism inside the engine: how a model is sharded, and the sums that the ranks of an instance exchange.

Engines and registration use it; the processes of the ranks are in `aegis.instance`.
"""
