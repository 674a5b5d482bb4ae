"""The machines of a Ray cluster, and the transfers of KV and weight images between them, as bytes with checksums.

The launcher opens it when a configuration has `--ray`; the node then uses its machines like the local one.
"""
