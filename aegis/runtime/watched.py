"""Tasks that a process cannot do without."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine

_logger = logging.getLogger(__name__)


def watched(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """A bug that stops it ends the process: else clients would wait for ever."""
    task = asyncio.create_task(work)
    task.add_done_callback(_end_if_broken)
    return task


def _end_if_broken(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _logger.error("ending, for a bug", exc_info=error)
        signal.raise_signal(signal.SIGTERM)
