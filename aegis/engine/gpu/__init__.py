"""Decode steps on a GPU: Triton kernels, inputs at fixed addresses and CUDA graphs. They have never run on a GPU.

`aegis.engine.transformers_engine` uses them where the device is a GPU.
"""
