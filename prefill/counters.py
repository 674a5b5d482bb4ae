"""The counts of what a prefill instance has done, for the metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Since the process started."""

    switches: int = 0
    prefills: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    swap_out_bytes: int = 0
    prefetches: int = 0
    abandoned: int = 0  # prefetches given up
