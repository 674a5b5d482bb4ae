"""A lane of an instance hangs: the instance still answers, and is of no use to the requests of that lane."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.faults.figures import Figures, noticed_s
from tests.faults.pool import opened
from tests.faults.thread_stop import stand_still_until_killed, threads_named
from tests.faults.trial import undergo
from tests.live.cases import Case
from tests.live.streams import Stream, client_of, until

WHILE_PROMPTS_RUN = 0.05  # of all tokens have come
ASKING = 16  # clients, while the instance hangs
ROOMY = "96MiB"  # for several of the models at once


async def _ask_until(killed: asyncio.Task[None], http: httpx.AsyncClient, case: Case) -> None:
    """Again and again, so that the lane that stands still has something to run."""
    while not killed.done():
        stream = Stream(case.body)
        await stream.run(http)
        assert stream.tokens == case.expected.tokens


@pytest.mark.long
def test_an_instance_of_which_one_lane_stands_still_is_replaced(
    tmp_path: Path, cache: Path, checkpoints_dir: Path, cases: Sequence[Case], figures: Figures
) -> None:
    options = ["--models", str(checkpoints_dir), "--device-memory", ROOMY, "--mixed", "1"]
    options += ["--policy", "muxwise", "--lanes", "2"]
    with opened("embedded", tmp_path / "pool", cache, *options, environment={"OMP_NUM_THREADS": "2"}) as pool:
        pid = pool.pid_of("mixed-0")

        async def strike() -> None:
            await until(lambda: bool(threads_named(pid, "lane 0")), "the device is divided")
            killed = asyncio.create_task(asyncio.to_thread(stand_still_until_killed, threads_named(pid, "lane 0")))
            async with client_of(pool.server.url) as http, asyncio.TaskGroup() as group:
                for case in cases[:ASKING]:
                    group.create_task(_ask_until(killed, http, case))
            await killed

        trial = undergo(pool.server, cases, WHILE_PROMPTS_RUN, strike)
        trial.verify()
        detection_s = noticed_s(trial, 'ended by force instance=mixed-0 why="its main loop, or one of its lanes')
        figures.add("stop a lane of mixed-0", trial, detection_s=detection_s)
        pool.server.wait_for_freed_memory()
        assert "Traceback" not in pool.server.output()
