"""Aegis serves a market of language models from a few devices."""

__version__ = "0.1.0"
