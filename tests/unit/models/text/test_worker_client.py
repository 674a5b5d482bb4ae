"""The proxy's end of a process that works on texts: which models the process knows, and who is blamed when it ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import msgspec
import pytest

from aegis.models.text.text_model import TextModel
from aegis.models.text.worker_client import TextProcess
from aegis.models.text.worker_messages import KNOWN_MAX, Counted, Encode, Encoded, encoded
from tests.unit.proxy.http.scripted import byte_text

WITHIN_S = 20.0


@pytest.fixture
def process() -> Iterator[TextProcess]:
    process = TextProcess(memory_bytes=512 << 20)
    yield process
    process.close()


def job(text: TextModel, words: str = "x") -> tuple[TextModel, msgspec.Raw]:
    return text, encoded(Encode(text.key, (words,), special=False, tokens_max=1000))


def test_a_batch_of_a_model_told_long_ago_and_a_new_one_is_answered(process: TextProcess) -> None:
    """Telling the new one makes the process forget another, which may be none that the batch needs."""
    texts = [byte_text() for _ in range(KNOWN_MAX + 1)]

    async def main() -> None:
        for text in texts[:KNOWN_MAX]:
            assert isinstance(await process.ask([job(text)], WITHIN_S), tuple)
        pid = process.pid
        answers = await process.ask([job(texts[0]), job(texts[KNOWN_MAX])], WITHIN_S)
        assert isinstance(answers, tuple), f"the process ended, and job {answers} is blamed"
        assert all(isinstance(answer, Encoded | Counted) for answer in answers)
        everyone = await process.ask([job(text) for text in texts[-KNOWN_MAX:]], WITHIN_S)
        assert isinstance(everyone, tuple) and process.pid == pid

    asyncio.run(main())


def test_a_process_that_ended_between_two_jobs_is_started_anew_and_nobody_is_blamed(process: TextProcess) -> None:
    text = byte_text()

    async def ask_once() -> int:
        assert isinstance(await process.ask([job(text)], WITHIN_S), tuple)
        assert process.pid
        return process.pid

    def end(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    async def twice() -> None:
        first = await ask_once()
        end(first)
        assert await ask_once() != first

    asyncio.run(twice())
    end(asyncio.run(ask_once()))  # while no loop runs
    asyncio.run(ask_once())


def test_a_model_that_takes_too_much_memory_is_blamed_and_no_other() -> None:
    process, small, large = TextProcess(memory_bytes=64 << 20), byte_text(), byte_text("x" * (128 << 20))

    async def main() -> None:
        assert isinstance(await process.ask([job(small)] * 3, WITHIN_S), tuple)
        assert await process.ask([job(large), job(small), job(small)], WITHIN_S) == 0

    asyncio.run(main())
    process.close()
