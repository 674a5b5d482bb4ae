"""Links between processes: Unix sockets on one machine, CURVE sockets between machines, and the messages on them.

The node, the proxies and the instances send and receive over them.
"""
