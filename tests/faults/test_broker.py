"""The broker, killed or standing still: nothing of a stream passes it, and nobody is taken for dead for its silence."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

import pytest

from tests.faults.figures import Figures, noticed_s
from tests.faults.pool import Pool
from tests.faults.trial import Trial, undergo
from tests.live.cases import Case

AWAY_S = 1.0
STOPPED_S = 5.0


def _verify(pool: Pool, trial: Trial, restarts: int) -> None:
    trial.verify()
    assert not trial.broken
    assert pool.server.metrics().total("instance_restarts_total") == restarts


@pytest.mark.long
def test_it_is_killed(pool: Pool, some_cases: Sequence[Case], moment: float, figures: Figures) -> None:
    """One of the user's is away for a second; the server's own is started again by itself."""
    restarts = pool.server.metrics().total("instance_restarts_total")
    away_s = AWAY_S if pool.kind == "external" else 0.0

    async def strike() -> None:
        pool.broker.kill()
        await asyncio.sleep(away_s)
        pool.broker.start()

    trial = undergo(pool.server, some_cases, moment, strike)
    _verify(pool, trial, restarts)
    detection_s, back_s = noticed_s(trial, "broker is away"), noticed_s(trial, "broker is back")
    figures.add(f"kill the broker, {pool.kind}", trial, detection_s=detection_s, recovery_s=back_s - detection_s)


@pytest.mark.long
def test_it_stands_still(pool: Pool, some_cases: Sequence[Case], moment: float, figures: Figures) -> None:
    """An instance that dies meanwhile is found all the same: its process ends."""
    restarts, pid = pool.server.metrics().total("instance_restarts_total"), pool.pid_of("decode-0")

    async def strike() -> None:
        pool.broker.pause()
        os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(STOPPED_S)
        pool.broker.resume()

    trial = undergo(pool.server, some_cases, moment, strike)
    _verify(pool, trial, restarts + 1)
    detection_s = noticed_s(trial, rf"\(pid {pid}\) ended with code")
    figures.add(f"stop the broker for 5 s, kill decode-0, {pool.kind}", trial, detection_s=detection_s)
