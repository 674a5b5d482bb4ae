"""Aegis serves a market of language models from a few devices.

docs/architecture.md has a map of the rooms in this package and beside it.
"""

__version__ = "0.1.0"
