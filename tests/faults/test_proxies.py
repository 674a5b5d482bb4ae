"""Proxies that are killed, or stand still: their clients' connections break, and asking again they have the answer."""

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

FIRST, LATER = "proxy-0", "proxy-1"
STOPPED_S = 5.0


def _answered_again_s(trial: Trial, detection_s: float) -> float:
    """From the detection until a client that had begun at the proxy gets tokens at another one."""
    began_s = [client.attempts[-1].arrivals_s[0] for client in trial.broken]
    return max(min(began_s) - trial.struck_monotonic_s - detection_s, 0.0)


def _verify(pool: Pool, trial: Trial, fault: str, figures: Figures, pattern: str) -> None:
    trial.verify(died=[LATER])
    assert {client.attempts[0].proxy for client in trial.clients} - {""} == {FIRST, LATER}
    assert trial.broken
    detection_s = noticed_s(trial, pattern)
    figures.add(
        f"{fault} {LATER}, {pool.kind}",
        trial,
        detection_s=detection_s,
        recovery_s=_answered_again_s(trial, detection_s),
    )


def test_one_is_killed(pool: Pool, some_cases: Sequence[Case], moment: float, figures: Figures) -> None:
    pid = pool.pid_of(LATER)

    async def strike() -> None:
        os.kill(pid, signal.SIGKILL)

    trial = undergo(pool.server, some_cases, moment, strike)
    _verify(pool, trial, "kill", figures, rf"{LATER} \(pid {pid}\) ended with code")


@pytest.mark.long
def test_one_stands_still(pool: Pool, some_cases: Sequence[Case], moment: float, figures: Figures) -> None:
    pid = pool.pid_of(LATER)

    async def strike() -> None:
        os.kill(pid, signal.SIGSTOP)

    trial = undergo(pool.server, some_cases, moment, strike)
    _verify(pool, trial, "stop", figures, rf"{LATER} \(pid {pid}\) does not answer")


@pytest.mark.long
def test_one_stands_still_while_an_instance_dies(
    pool: Pool, some_cases: Sequence[Case], moment: float, figures: Figures
) -> None:
    """It cannot say that it knows, and others do not wait for ever."""
    pid = pool.pid_of(LATER)

    async def strike() -> None:
        os.kill(pid, signal.SIGSTOP)
        os.kill(pool.pid_of("decode-0"), signal.SIGKILL)

    trial = undergo(pool.server, some_cases, moment, strike)
    _verify(pool, trial, "kill decode-0 and stop", figures, rf"{LATER} \(pid {pid}\) does not answer")


@pytest.mark.long
def test_the_launcher_stands_still(pool: Pool, some_cases: Sequence[Case], moment: float, figures: Figures) -> None:
    """And the proxy that is in it. Nobody is taken for lost meanwhile, and its clients' streams go on afterwards."""
    restarts = pool.server.metrics().total("instance_restarts_total")
    launcher, proxy = pool.server.process.pid, pool.pid_of(LATER)

    async def strike() -> None:
        os.kill(launcher, signal.SIGSTOP)
        await asyncio.sleep(STOPPED_S)
        os.kill(launcher, signal.SIGCONT)

    trial = undergo(pool.server, some_cases, moment, strike)
    trial.verify()
    assert not trial.broken
    assert (pool.pid_of(LATER), pool.server.metrics().total("instance_restarts_total")) == (proxy, restarts)
    figures.add(f"stop the launcher for 5 s, {pool.kind}", trial)
