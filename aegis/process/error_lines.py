"""Errors as they stand in a sentence of ours: libraries and the system break what theirs say into lines."""

from __future__ import annotations


def flattened(said: object) -> str:
    """What an error, or another text, says, on one line."""
    return " ".join(str(said).split())
