"""The report about a stuck test names the place."""

from __future__ import annotations

import asyncio

from tests.stuck import waiting


def test_a_task_is_told_by_the_places_it_waits_at() -> None:
    async def inner() -> None:
        await asyncio.Event().wait()

    async def outer() -> None:
        await inner()

    async def main() -> list[str]:
        task = asyncio.create_task(outer(), name="one that waits")
        await asyncio.sleep(0)
        told = waiting()
        task.cancel()
        return told

    (line,) = [line for line in asyncio.run(main()) if line.startswith("one that waits: ")]
    assert [place.partition(" ")[2] for place in line.partition(": ")[2].split(" > ")] == ["outer", "inner", "wait"]
    assert line.count("test_stuck.py:") == 2
