"""The metadata store (Redis): the records and claims of requests, the leases of proxies, and the loads of instances.

Each proxy opens a store; without Redis there is none, and requests are served all the same.
"""
