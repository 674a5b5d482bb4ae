"""Tasks that a process cannot do without, and their end."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine
from typing import Any

_AGAIN_S = 0.5

_logger = logging.getLogger(__name__)


def watched(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """A bug that stops it ends the process: else clients would wait for ever."""
    task = asyncio.create_task(work)
    task.add_done_callback(_end_if_broken)
    return task


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Returns when all have ended. What waits in `asyncio.wait_for` up to Python 3.11, as libraries do, misses a
    cancellation that comes with what it waits for: it is asked again. What a task does for its end takes less than
    `_AGAIN_S`, or is broken off."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)


def _end_if_broken(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _logger.error("ending, for a bug", exc_info=error)
        signal.raise_signal(signal.SIGTERM)
