"""The roles of instances, and how many lanes their devices have."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal


class Role(StrEnum):
    """Instances are named after it: `prefill-0`, `mixed-3`."""

    PREFILL = "prefill"  # makes first tokens and hands the KV over
    DECODE = "decode"  # goes on from handed-over KV
    MIXED = "mixed"  # makes all tokens of a request: its KV never leaves for that


class Roles(StrEnum):
    """The ways in which a pool divides the work."""

    AUTO = "auto"  # every instance prefills and decodes
    FIXED = "fixed"  # some prefill, the others decode


LaneCount = Literal["off", "auto", "2"]
"""How many lanes an instance's device is to have. `auto`: two on CPUs where they can be had; `2`: on any device, and
where they cannot be had it is said."""
