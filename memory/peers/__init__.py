"""Loads over the links of several devices, counted: who carries for whom, and the pages that are lent for it.

`aegis.device.shared_loads` moves the bytes.
"""
