"""The counts of what a decode or mixed instance has done, for the metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Since the process started."""

    switches: int = 0
    preemptions: int = 0
    prefetches: int = 0
    abandoned: int = 0  # prefetches given up
    prefills: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    steps: int = 0
    guarded_steps: int = 0  # beside a run on the other lane
    guard_exceeded_steps: int = 0  # of those: they took longer than the guard had said
    generated_tokens: int = 0
    fetched_bytes: int = 0  # from other machines
    swap_in_bytes: int = 0
    swap_out_bytes: int = 0
    compacted_bytes: int = 0
    given_up: int = 0
