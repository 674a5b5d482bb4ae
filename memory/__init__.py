"""The accounts of memory: pages, weights, KV slabs and blocks, and their holders. They count and touch no bytes.

The cores of `prefill` and `decode`, the node and the simulator keep their accounts here.
"""
