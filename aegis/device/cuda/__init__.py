"""The CUDA device: virtual memory management, streams and pinned memory through the CUDA driver API.

`aegis.device.open_device` opens it. It has never run on a GPU.
"""
