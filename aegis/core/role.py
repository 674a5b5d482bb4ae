"""The roles of instances."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """Instances are named after it: `prefill-0`, `mixed-3`."""

    PREFILL = "prefill"  # makes first tokens and hands the KV over
    DECODE = "decode"  # goes on from handed-over KV
    MIXED = "mixed"  # makes all tokens of a request: its KV never leaves for that


class Roles(StrEnum):
    """The ways in which a pool divides the work."""

    AUTO = "auto"  # every instance prefills and decodes
    FIXED = "fixed"  # some prefill, the others decode
