"""Work that would keep the event loop from others, in a thread.

There is one thread for all of it: a call that does not let the interpreter go keeps the loop waiting, and two threads
of such calls would keep it waiting twice as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

FEW = 2048
"""Tokens or parts that are worked on in a fraction of a millisecond."""

AWAKE_S = 0.1
"""That the thread waits for the loop at most."""

_THREAD = ThreadPoolExecutor(1, "beside-loop")
T = TypeVar("T")


def _handed_over(work: Callable[[], T], loop: asyncio.AbstractEventLoop) -> T:
    """Its result, once the loop has had the interpreter.

    A job that is shorter than the interpreter's switch interval gives it up when it tells the loop of its end, and has
    it back before the loop is awake: job after job, and the loop waits for the last of them.
    """
    result, awake = work(), threading.Event()
    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(awake.set)
        awake.wait(AWAKE_S)
    return result


async def beside_loop(work: Callable[[], T], size: int, *, few: int = FEW) -> T:
    """The result of `work` on `size` items: computed in the thread, unless they are few."""
    if size <= few:
        return work()
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_THREAD, _handed_over, work, loop)
