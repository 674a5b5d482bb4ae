"""Asking the node for permits: what it refuses is 429, and what nobody waits for any more is given back."""

from __future__ import annotations

import asyncio

import pytest

from aegis.core.clock import NS_PER_S
from aegis.core.errors import UserError
from aegis.core.limits import UNLIMITED, Limits, Scope
from aegis.transport.node_messages import FromProxy, PermitAnswer, PermitOver, PermitUsed, PermitWanted
from proxy.live.permits import ProxyPermits

SCOPES = (Scope("key", "alice", Limits(concurrent=1)), Scope("model", "m", UNLIMITED))


def test_only_what_is_limited_is_asked_about() -> None:
    told: list[FromProxy] = []

    async def main() -> None:
        permits = ProxyPermits(told.append)
        (await permits.ask(SCOPES[1:])).close(3)
        assert told == []
        asking = asyncio.create_task(permits.ask(SCOPES))
        await asyncio.sleep(0)
        permits.answered(PermitAnswer(0))
        permit = await asking
        permit.use(5)
        permit.close(3)

    asyncio.run(main())
    assert told == [PermitWanted(0, SCOPES[:1]), PermitUsed(0, 5), PermitOver(0, 3)]


def test_a_refusal_says_when_to_come_again_in_whole_seconds() -> None:
    async def main() -> None:
        permits = ProxyPermits(
            lambda message: permits.answered(PermitAnswer(0, "key 'alice' is busy", NS_PER_S + 1, "key"))
        )
        with pytest.raises(UserError, match="key 'alice' is busy; try again in 2 s") as caught:
            await permits.ask(SCOPES)
        assert (caught.value.status, caught.value.retry_after_s, caught.value.reason) == (429, 2, "key_limit")

    asyncio.run(main())


def test_who_leaves_before_the_answer_gives_it_back() -> None:
    told: list[FromProxy] = []

    async def main() -> None:
        permits = ProxyPermits(told.append)
        asking = asyncio.create_task(permits.ask(SCOPES))
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        permits.answered(PermitAnswer(0))

    asyncio.run(main())
    assert told[1:] == [PermitOver(0, 0)]
