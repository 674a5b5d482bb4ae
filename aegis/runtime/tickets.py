"""What a client of the market holds for one sequence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from aegis.core.ids import RequestId
from proxy.events import ClientLeft
from proxy.http.boundary import Delivery, Failed, Finished


class LiveTicket:
    """One sequence's deliveries. Implements `proxy.http.boundary.Ticket`."""

    def __init__(self, request: RequestId, leave: Callable[[ClientLeft], None]) -> None:
        self._request = request
        self._leave = leave
        self._queue: asyncio.Queue[Delivery] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while True:
            delivery = await self._queue.get()
            yield delivery
            if isinstance(delivery, Finished | Failed):
                return

    def cancel(self, *, satisfied: bool = False) -> None:
        self._leave(ClientLeft(self._request, satisfied))

    def put(self, delivery: Delivery) -> None:
        self._queue.put_nowait(delivery)
