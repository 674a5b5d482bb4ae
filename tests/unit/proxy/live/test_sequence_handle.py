"""A client that reads more slowly than its answer is made is not waited for, nor buffered for without end."""

from __future__ import annotations

import asyncio

from aegis.core.ids import RequestId
from aegis.core.request import Token
from proxy.http.market import Delivery, Delta, Failed
from proxy.live.sequence_handle import UNREAD_MAX, LiveSequenceHandle
from proxy.live.unread_answers import UnreadAnswers
from proxy.routing.events import ClientLeft

DELTA = Delta((Token(1),))


def test_what_is_not_read_is_kept_up_to_a_bound_then_the_request_ends() -> None:
    left: list[ClientLeft] = []

    async def main() -> list[Delivery]:
        call_id = LiveSequenceHandle(RequestId(7), left.append, lambda request: None, UnreadAnswers())
        for _ in range(UNREAD_MAX):
            call_id.put(DELTA)
        await asyncio.sleep(0)
        assert left == []
        call_id.put(DELTA)
        call_id.put(DELTA)
        await asyncio.sleep(0)
        assert left == [ClientLeft(RequestId(7))]
        call_id.put(Failed("cancelled", 499))
        return [delivery async for delivery in call_id]

    *read, last = asyncio.run(main())
    assert len(read) == UNREAD_MAX + 2
    assert isinstance(last, Failed) and "were not read" in last.message
