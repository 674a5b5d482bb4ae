"""The books of memory: pages, weights, KV slabs and blocks, and who may have which. They count and touch no bytes.

The cores of `prefill` and `decode`, the node and the simulator keep their accounts here.
"""
