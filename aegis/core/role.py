"""What an instance is for."""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """Instances are named after it: `prefill-0`, `mixed-3`."""

    PREFILL = "prefill"  # makes first tokens and hands the KV over
    DECODE = "decode"  # goes on from handed-over KV
    MIXED = "mixed"  # makes all tokens of a request: its KV never leaves for that
