"""Buffers that one system call fills or empties together, as far as it gets."""

from __future__ import annotations

from collections.abc import Sequence


def left_after(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of them when the first `count` bytes are done."""
    for at, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[at + 1 :]]
        count -= len(buffer)
    return []
