"""A test that nothing else ends tells what its coroutines wait for, and ends the run.

`pytest-timeout` raises from a signal handler, which uvloop takes for an error of some callback: the test goes on.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path
from threading import Timer
from types import CoroutineType
from typing import Any

import pytest

STUCK_S = 630.0  # after the timeout of a test, before that of faulthandler


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    timer = Timer(STUCK_S, _end, (item,))
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()


def waiting() -> list[str]:
    """A line for each task of any loop of this process: where it waits, from the outside in."""
    tasks = [task for task in gc.get_objects() if issubclass(type(task), asyncio.Task) and not task.done()]
    return sorted(f"{task.get_name()}: {' > '.join(_places(task.get_coro()))}" for task in tasks)


def _places(work: object) -> list[str]:
    places = []
    while isinstance(work, CoroutineType) and work.cr_frame:
        code = work.cr_code
        places.append(f"{Path(code.co_filename).name}:{work.cr_frame.f_lineno} {code.co_name}")
        work = work.cr_await
    return places


def _end(item: pytest.Item) -> None:
    capture = item.config.pluginmanager.getplugin("capturemanager")
    if capture:
        capture.suspend_global_capture()
    sys.stderr.write("\n".join([f"{item.nodeid} is stuck.", *waiting(), ""]))
    sys.stderr.flush()
    os._exit(1)
