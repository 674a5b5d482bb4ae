"""Work that would keep the event loop from others, in a thread.

There is one thread for all of it: a call that does not let the interpreter go keeps the loop waiting, and two threads
of such calls would keep it waiting twice as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

FEW = 2048
"""Tokens or parts that are worked on in a fraction of a millisecond."""

_THREAD = ThreadPoolExecutor(1, "beside-loop")
T = TypeVar("T")


async def beside_loop(work: Callable[[], T], size: int, *, few: int = FEW) -> T:
    """The result of `work` on `size` items: computed in the thread, unless they are few."""
    return work() if size <= few else await asyncio.get_running_loop().run_in_executor(_THREAD, work)
