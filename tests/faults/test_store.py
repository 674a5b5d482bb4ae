"""Redis, killed or standing still: no stream notices. New requests wait for it, then they are refused; what was
answered meanwhile is known afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
import pytest

from tests.faults.figures import Figures, noticed_s
from tests.faults.pool import Pool
from tests.faults.trial import Trial, undergo
from tests.live.cases import Case
from tests.live.server import eventually
from tests.live.streams import run_all

AWAY_S = 1.0
STOPPED_S = 5.0
PROXIES = 2


def _answers_are_known(pool: Pool, trial: Trial, *, kept: bool) -> None:
    """Tokens that were `kept` are not generated again; the whole answer is the same."""
    server = pool.server
    eventually(lambda: server.metrics().total("store_up") == PROXIES, "every proxy uses Redis again")
    eventually(lambda: server.metrics().total("store_unwritten") == 0, "all of it is written")
    replayed = server.metrics().total("store_replayed_total")
    again = run_all(server.url, [client.body for client in trial.clients])
    assert [stream.tokens for stream in again] == [client.expected for client in trial.clients]
    assert server.metrics().total("store_replayed_total") == replayed + len(again) or not kept


@pytest.mark.long
def test_it_is_killed(pool: Pool, some_cases: Sequence[Case], moment: float, figures: Figures) -> None:
    """One of the user's is away for a second; the server's own is started again by itself."""

    async def strike() -> None:
        pool.redis.kill()
        if pool.kind == "external":
            await asyncio.sleep(AWAY_S)
        pool.redis.start()

    trial = undergo(pool.server, some_cases, moment, strike)
    trial.verify()
    assert not trial.broken
    detection_s, back_s = noticed_s(trial, "Redis cannot be used"), noticed_s(trial, "Redis can be used again")
    figures.add(f"kill Redis, {pool.kind}", trial, detection_s=detection_s, recovery_s=back_s - detection_s)
    _answers_are_known(pool, trial, kept=False)


@pytest.mark.long
def test_it_stands_still(pool: Pool, some_cases: Sequence[Case], moment: float, figures: Figures) -> None:
    refused: list[httpx.Response] = []

    async def strike() -> None:
        pool.redis.pause()
        body = some_cases[0].body | {"request_id": f"late-{moment}"}
        asked = asyncio.to_thread(pool.server.post, "/v1/completions", body)
        reply, _ = await asyncio.gather(asked, asyncio.sleep(STOPPED_S))
        pool.redis.resume()
        refused.append(reply)

    trial = undergo(pool.server, some_cases, moment, strike)
    trial.verify()
    assert not trial.broken
    (reply,) = refused
    assert (reply.status_code, reply.json()["error"]["code"]) == (httpx.codes.SERVICE_UNAVAILABLE, "store_unavailable")
    assert int(reply.headers["retry-after"]) > 0
    detection_s, back_s = noticed_s(trial, "Redis cannot be used"), noticed_s(trial, "Redis can be used again")
    recovery_s = max(back_s - STOPPED_S, 0.0)
    figures.add(f"stop Redis for 5 s, {pool.kind}", trial, detection_s=detection_s, recovery_s=recovery_s)
    _answers_are_known(pool, trial, kept=True)
