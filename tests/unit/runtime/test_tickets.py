"""A client that reads more slowly than its answer is made is not waited for, nor buffered for without end."""

from __future__ import annotations

import asyncio

from aegis.core.ids import RequestId
from aegis.core.request import Token
from aegis.runtime.backlog import Backlog
from aegis.runtime.tickets import UNREAD_MAX, LiveTicket
from proxy.events import ClientLeft
from proxy.http.boundary import Delivery, Delta, Failed

DELTA = Delta((Token(1),))


def test_what_is_not_read_is_kept_up_to_a_bound_then_the_request_ends() -> None:
    left: list[ClientLeft] = []

    async def main() -> list[Delivery]:
        ticket = LiveTicket(RequestId(7), left.append, lambda request: None, Backlog())
        for _ in range(UNREAD_MAX):
            ticket.put(DELTA)
        await asyncio.sleep(0)
        assert left == []
        ticket.put(DELTA)
        ticket.put(DELTA)
        await asyncio.sleep(0)
        assert left == [ClientLeft(RequestId(7))]
        ticket.put(Failed("cancelled", 499))
        return [delivery async for delivery in ticket]

    *read, last = asyncio.run(main())
    assert len(read) == UNREAD_MAX + 2
    assert isinstance(last, Failed) and "were not read" in last.message
