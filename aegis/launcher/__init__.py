"""`aegis launch`: opens the node, the proxies and the services of a market, watches the configuration, ends them all.

The command line calls it.
"""
