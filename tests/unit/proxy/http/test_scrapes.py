"""However many scrape at once, few answers are made, and none is older than its question."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from proxy.http.scrapes import Scrapes

SCRAPERS = 100


def test_those_that_come_together_share_an_answer() -> None:
    numbers = count()

    async def compute() -> bytes:
        return b"%d" % next(numbers)

    async def main() -> None:
        scrapes = Scrapes(period_s=3600)
        assert await asyncio.gather(*(scrapes.answer(compute) for _ in range(SCRAPERS))) == [b"0"] * SCRAPERS
        later = asyncio.create_task(scrapes.answer(compute))
        for _ in range(SCRAPERS):
            await asyncio.sleep(0)
        assert not later.done(), "within the same period there is no other"

    asyncio.run(main())


def test_who_asks_while_one_is_computed_gets_the_next_one() -> None:
    numbers, begun, gates = count(), asyncio.Event(), [asyncio.Event(), asyncio.Event()]

    async def compute() -> bytes:
        number = next(numbers)
        begun.set()
        await gates[number].wait()
        return b"%d" % number

    async def main() -> None:
        scrapes = Scrapes(period_s=0)
        first = asyncio.create_task(scrapes.answer(compute))
        await begun.wait()
        others = [asyncio.create_task(scrapes.answer(compute)) for _ in range(SCRAPERS)]
        await asyncio.sleep(0)
        others[0].cancel()
        gates[0].set()
        assert await first == b"0"
        gates[1].set()
        assert await asyncio.gather(*others[1:]) == [b"1"] * (SCRAPERS - 1)

    asyncio.run(main())


def test_an_answer_that_fails_is_told_and_the_next_one_is_made() -> None:
    async def fail() -> bytes:
        raise ValueError

    async def compute() -> bytes:
        return b"well"

    async def main() -> None:
        scrapes = Scrapes(period_s=0)
        with pytest.raises(ValueError):
            await scrapes.answer(fail)
        assert await scrapes.answer(compute) == b"well"

    asyncio.run(main())
