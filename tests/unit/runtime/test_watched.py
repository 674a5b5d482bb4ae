"""A bug does not leave clients waiting."""

from __future__ import annotations

import asyncio
import signal

import pytest

from aegis.runtime.watched import watched


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
