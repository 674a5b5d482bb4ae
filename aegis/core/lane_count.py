"""How many lanes the device of an instance is to have."""

from __future__ import annotations

from typing import Literal

LaneCount = Literal["off", "auto", "2"]
"""`auto`: two where the device can be divided; `2`: the same, and it is said where it cannot be."""
