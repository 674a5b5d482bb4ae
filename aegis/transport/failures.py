"""The failures of links."""

from __future__ import annotations


class LinkBroken(Exception):
    """A link of an instance to another machine broke, and with it messages were lost. The text is one line."""
