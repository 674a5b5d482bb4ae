"""The core of the proxy: each request from arrival to its terminal reply, the instance it goes to, and the permits.

`proxy.live` and `aegis.sim` drive it.
"""
