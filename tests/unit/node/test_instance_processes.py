"""The environment of instances: how many threads each computes with, and what it keeps of compiled products. The
processes of an instance's ranks are all there, or none is."""

from __future__ import annotations

import asyncio
import os
from typing import Any, cast

import pytest
from msgspec.structs import replace

from aegis.node.instance_processes import environment_for, start
from tests.unit.node.test_instance_supervisor import TEMPLATE, Process


@pytest.mark.parametrize(
    ("cores", "processes", "threads", "threads_for_lanes"),
    [(1, 1, 1, 1), (2, 1, 1, 2), (2, 2, 1, 1), (3, 1, 1, 2), (4, 1, 2, 2), (4, 2, 1, 2), (16, 1, 8, 8), (16, 7, 2, 2)],
)
def test_threads_are_shared_out_and_two_lanes_have_two_where_there_are_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, processes: int, threads: int, threads_for_lanes: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert environment_for(processes)["OMP_NUM_THREADS"] == str(threads)
    assert environment_for(processes, lanes=True)["OMP_NUM_THREADS"] == str(threads_for_lanes)


def test_what_the_user_says_of_threads_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert environment_for(1, lanes=True)["OMP_NUM_THREADS"] == "1"


def test_compiled_products_are_few_unless_the_user_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    told = environment_for(1)
    assert (told["ONEDNN_PRIMITIVE_CACHE_CAPACITY"], told["LRU_CACHE_CAPACITY"]) == ("7", "8")


@pytest.mark.parametrize("broken_off", [False, True])
def test_ranks_of_which_one_does_not_start_all_end(broken_off: bool) -> None:
    first, asked = Process(), asyncio.Event()

    class Server:
        """Starts the first rank alone."""

        async def start(self, module: str, *_: str, **__: object) -> Process:
            if module == "aegis.instance.process":
                return first
            asked.set()
            if not broken_off:
                raise OSError(12, "Cannot allocate memory")
            return await asyncio.Future()

    async def main() -> None:
        ranks = [replace(TEMPLATE, rank=rank, ranks=2) for rank in range(2)]
        starting = asyncio.create_task(start(cast(Any, Server()), ranks, {}))
        await asked.wait()
        if broken_off:
            starting.cancel()
        with pytest.raises(asyncio.CancelledError if broken_off else OSError):
            await starting
        assert await asyncio.wait_for(first.wait(), 1) == -9

    asyncio.run(main())
