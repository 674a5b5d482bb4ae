"""The processes of one instance, one for each of its ranks, as children of this one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence

import msgspec

from aegis.instance.settings import InstanceSettings
from aegis.process.child import follow_launcher


class Processes:
    """Running. `pid` is the first rank's."""

    def __init__(self, ranks: Sequence[asyncio.subprocess.Process]) -> None:
        self._ranks = ranks
        self.pid = ranks[0].pid

    def kill(self) -> None:
        """All of them: the others cannot go on without it."""
        _kill(self._ranks[0])

    async def wait(self) -> int:
        """Waits until one of them ends, and the others with it; returns its exit code."""
        waiting = {asyncio.create_task(process.wait()): process for process in self._ranks}
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        first = min((waiting[task] for task in done), key=self._ranks.index)
        for process in self._ranks:
            await _ended(process)
        assert first.returncode is not None
        return first.returncode


async def start(ranks: Sequence[InstanceSettings], environment: Mapping[str, str]) -> Processes:
    """Raises OSError, with none of them left."""
    started = list[asyncio.subprocess.Process]()
    try:
        for settings in ranks:
            started.append(await _spawn(settings, environment))
    except OSError:
        for process in started:
            await _ended(process)
        raise
    return Processes(started)


def environment_for(processes: int, *, lanes: bool = False) -> dict[str, str]:
    """Threads shared fairly between so many: more than there are cores makes timings go wild. A core is left for the
    others of the server, unless an instance could not have two `lanes` without it."""
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // (processes + 1), min(2, cores // processes) if lanes else 0)
    return {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", **os.environ}


async def _spawn(settings: InstanceSettings, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    rank = settings.rank
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"aegis.instance.{'follower_rank' if rank else 'process'}",
        f"{settings.instance}/{rank}" if rank else settings.instance,  # for readers of the process list
        stdin=asyncio.subprocess.PIPE,
        env=environment,
        preexec_fn=follow_launcher,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(settings))
    with contextlib.suppress(ConnectionError):
        await process.stdin.drain()
    process.stdin.close()
    return process


async def _ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        _kill(process)
        await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
