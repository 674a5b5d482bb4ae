"""A bug does not leave clients waiting, nor does a missed cancellation whoever closes."""

from __future__ import annotations

import asyncio
import signal

import pytest

from aegis.process import tasks
from aegis.process.tasks import cancelled, watched


async def _work(error: Exception | None) -> None:
    if error:
        raise error


@pytest.mark.parametrize("error", [None, ValueError("a bug")])
def test_a_bug_ends_the_process_and_is_logged(error: Exception | None, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        ended = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
        await asyncio.wait([watched(_work(error))])
        if error:
            await asyncio.wait_for(ended.wait(), 10)
        assert ended.is_set() == bool(error)

    asyncio.run(main())
    assert ("a bug" in caplog.text) == bool(error)


def test_who_misses_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `asyncio.wait_for` does where what it waits for comes at the same moment."""
    monkeypatch.setattr(tasks, "_AGAIN_S", 0.01)

    async def main() -> None:
        met = asyncio.Event()

        async def for_ever() -> None:
            while True:
                await asyncio.wait_for(met.wait(), 60)
                met.clear()

        task = asyncio.create_task(for_ever())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        met.set()
        await asyncio.sleep(0)  # `met.wait()` has returned, who waits for it does not know
        await asyncio.wait_for(cancelled(task), 30)
        assert task.cancelled()

    asyncio.run(main())
