"""Requests begin a few in a turn of the loop, in their order; those that nobody waits for any more cost no turn."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from proxy.http.security.paced_starts import BEGUN_AT_ONCE, PacedStarts


def test_a_request_that_comes_alone_begins_at_once_and_others_a_few_in_a_turn() -> None:
    begun: list[int] = []

    async def main() -> list[int]:
        starts, loop, after = PacedStarts(), asyncio.get_running_loop(), list[int]()
        for i in range(10):
            starts.begin(loop, lambda i=i: begun.append(i) is None)
            after.append(len(begun))
        while len(begun) < 10:
            await asyncio.sleep(0)
            after.append(len(begun))
        return after

    after = asyncio.run(main())
    assert after[:10] == [1] * 10, "the others come in the same turn"
    assert begun == list(range(10))
    assert max(b - a for a, b in pairwise(after)) == BEGUN_AT_ONCE


def test_requests_that_begin_one_turn_after_another_do_not_wait() -> None:
    async def main() -> None:
        starts, loop = PacedStarts(), asyncio.get_running_loop()
        for _ in range(5):
            begun: list[int] = []
            starts.begin(loop, lambda begun=begun: begun.append(1) is None)
            assert begun
            await asyncio.sleep(0)
            await asyncio.sleep(0)

    asyncio.run(main())


def test_those_who_left_are_passed_over() -> None:
    begun: list[str] = []

    async def main() -> None:
        starts, loop = PacedStarts(), asyncio.get_running_loop()
        starts.begin(loop, lambda: begun.append("first") is None)
        for _ in range(1000):
            starts.begin(loop, lambda: False)
        starts.begin(loop, lambda: begun.append("last") is None)
        await asyncio.sleep(0)
        assert begun == ["first", "last"]

    asyncio.run(main())
