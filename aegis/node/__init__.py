"""The node: processes, devices, weight image caches and the model catalogue of a market's machines.

The launcher opens it; proxies and instances talk to it over links.
"""
