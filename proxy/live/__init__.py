"""The process of a proxy: the router of `proxy.routing` wired to clients, instances and the node.

The launcher runs the first proxy in its own process and starts further ones with `python -m proxy.live.process`.
"""
