"""Instances that are killed, or stand still: their requests go on elsewhere as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.figures import Figures, noticed_s, replaced_s
from tests.faults.pool import Pool, opened
from tests.faults.trial import Trial, undergo
from tests.live.cases import Case
from tests.live.server import processes_of

STOPPED_S = 5.0
FORK_SERVER = " aegis.process.fork_server "


def _ended(pid: int) -> str:
    return rf"\(pid {pid}\) ended with code"


def kill(pool: Pool, some_cases: Sequence[Case], moment: float, process: str, figures: Figures) -> None:
    """One of its processes, for that of an instance of several."""
    pid, restarts = pool.pid_of(process), pool.server.metrics().total("instance_restarts_total")
    instance = process.partition("/")[0]

    async def strike() -> None:
        os.kill(pid, signal.SIGKILL)

    trial = undergo(pool.server, some_cases, moment, strike)
    trial.verify()
    _tell(figures, trial, f"kill {process}, {pool.kind}", instance, rf"{instance} \(pid \d+\) ended with code")
    assert pool.server.metrics().total("instance_restarts_total") == restarts + 1


def _tell(figures: Figures, trial: Trial, fault: str, instance: str, pattern: str) -> None:
    detection_s = noticed_s(trial, pattern)
    figures.add(fault, trial, detection_s=detection_s, recovery_s=replaced_s(trial, instance, detection_s))


@pytest.mark.parametrize("instance", [pytest.param("prefill-0", marks=pytest.mark.long), "decode-0"])
def test_one_is_killed(pool: Pool, some_cases: Sequence[Case], moment: float, instance: str, figures: Figures) -> None:
    kill(pool, some_cases, moment, instance, figures)


@pytest.mark.long
def test_a_mixed_one_is_killed(
    tmp_path: Path, cache: Path, checkpoints_dir: Path, some_cases: Sequence[Case], moment: float, figures: Figures
) -> None:
    options = ["--models", str(checkpoints_dir), "--device-memory", "64MiB", "--mixed", "2"]
    with opened("embedded", tmp_path / "pool", cache, *options) as pool:
        kill(pool, some_cases, moment, "mixed-1", figures)
        pool.server.wait_for_freed_memory()
        assert "Traceback" not in pool.server.output()


@pytest.mark.long
@pytest.mark.parametrize("instance", ["decode-1", "prefill-1"])
def test_one_stands_still(
    pool: Pool, some_cases: Sequence[Case], moment: float, instance: str, figures: Figures
) -> None:
    """It is ended, and another one started, before it could go on."""
    pid = pool.pid_of(instance)

    async def strike() -> None:
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)
        if pid in processes_of(pool.server.process.pid):
            os.kill(pid, signal.SIGCONT)

    trial = undergo(pool.server, some_cases, moment, strike)
    trial.verify()
    _tell(figures, trial, f"stop {instance}, {pool.kind}", instance, f'ended by force instance={instance} why="no sign')


def _fork_server(pool: Pool) -> int:
    (pid,) = [pid for pid, command in processes_of(pool.server.process.pid).items() if FORK_SERVER in command]
    return pid


@pytest.mark.long
@pytest.mark.parametrize("with_parent", [False, True])
def test_all_are_killed(
    pool: Pool, some_cases: Sequence[Case], moment: float, with_parent: bool, figures: Figures
) -> None:
    """Nobody is left: their requests wait for those that are started again. If the process that forks them ends, so do
    they."""

    async def strike() -> None:
        instances = map(pool.pid_of, pool.server.metrics().instances())
        for pid in [_fork_server(pool)] if with_parent else list(instances):
            os.kill(pid, signal.SIGKILL)

    trial = undergo(pool.server, some_cases, moment, strike)
    trial.verify()
    what = "the process that forks instances" if with_parent else "all instances"
    figures.add(f"kill {what}, {pool.kind}", trial, detection_s=noticed_s(trial, "ended with code"))
