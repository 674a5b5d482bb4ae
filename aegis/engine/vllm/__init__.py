"""The vLLM backend: vLLM's model classes and kernels, with weights and KV in memory of aegis.

`aegis.engine.engines` opens it for models whose image asks for it. Only `adapter` and `norms` import vLLM.
"""
