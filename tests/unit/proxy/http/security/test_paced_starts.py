"""Requests begin a few in a turn of the loop, in their order; those that nobody waits for any more cost no turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import pairwise

import pytest

from proxy.http.security.paced_starts import BEGUN_AT_ONCE, PacedStarts


def begin(starts: PacedStarts, start: Callable[[], bool]) -> None:
    if not starts.waits(asyncio.get_running_loop(), start):
        start()


def test_a_request_that_comes_alone_begins_at_once_and_others_a_few_in_a_turn() -> None:
    begun: list[int] = []

    async def main() -> list[int]:
        starts, after = PacedStarts(), list[int]()
        for i in range(3 * BEGUN_AT_ONCE):
            begin(starts, lambda i=i: begun.append(i) is None)
            after.append(len(begun))
        while len(begun) < 3 * BEGUN_AT_ONCE:
            await asyncio.sleep(0)
            after.append(len(begun))
        return after

    after = asyncio.run(main())
    assert after[: 3 * BEGUN_AT_ONCE] == [1] * 3 * BEGUN_AT_ONCE, "the others come in the same turn"
    assert begun == list(range(3 * BEGUN_AT_ONCE))
    assert max(b - a for a, b in pairwise(after)) == BEGUN_AT_ONCE


def test_requests_that_begin_one_turn_after_another_do_not_wait() -> None:
    async def main() -> None:
        starts = PacedStarts()
        for _ in range(5):
            begun: list[int] = []
            begin(starts, lambda begun=begun: begun.append(1) is None)
            assert begun
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(main())


def test_those_who_left_are_passed_over() -> None:
    begun: list[str] = []

    async def main() -> None:
        starts = PacedStarts()
        begin(starts, lambda: begun.append("first") is None)
        for _ in range(1000):
            begin(starts, lambda: False)
        begin(starts, lambda: begun.append("last") is None)
        await asyncio.sleep(0)
        assert begun == ["first", "last"]

    asyncio.run(main())


def test_one_that_fails_keeps_no_other_from_beginning() -> None:
    begun: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        starts = PacedStarts()
        begin(starts, lambda: begun.append("first") is None)
        begin(starts, lambda: pytest.fail("drawn"))
        begin(starts, lambda: begun.append("last") is None)
        for _ in range(3):
            await asyncio.sleep(0)
        assert begun == ["first", "last"]

    asyncio.run(main())
