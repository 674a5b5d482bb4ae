"""Work that would keep the event loop from others, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

FEW = 2048
"""Tokens or parts that are worked on in a fraction of a millisecond."""

T = TypeVar("T")


async def beside_loop(work: Callable[[], T], size: int, *, few: int = FEW) -> T:
    """What `work` makes of `size` of something: in a thread, unless they are few."""
    return work() if size <= few else await asyncio.to_thread(work)
