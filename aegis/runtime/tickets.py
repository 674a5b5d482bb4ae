"""What a client of the market holds for one sequence."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from aegis.core.ids import RequestId
from proxy.events import ClientLeft
from proxy.http.boundary import Delivery, Failed, Finished

UNREAD_MAX = 4096
"""So many deliveries wait for a client that reads more slowly than its answer is made; then it gets no more."""


class LiveTicket:
    """One sequence's deliveries. Implements `proxy.http.boundary.Ticket`."""

    def __init__(
        self, request: RequestId, leave: Callable[[ClientLeft], None], before: Callable[[RequestId], int | None]
    ) -> None:
        self.request = request
        self._leave = leave
        self._before = before
        self._unread: deque[Delivery] = deque()
        self._reader: asyncio.Future[None] | None = None  # waits for more
        self._fell_behind = False

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while True:
            while not self._unread:
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            delivery = self._unread.popleft()
            yield delivery
            if isinstance(delivery, Finished | Failed):
                return

    def before(self) -> int | None:
        return self._before(self.request)

    def cancel(self, *, satisfied: bool = False) -> None:
        self._leave(ClientLeft(self.request, satisfied))

    def put(self, delivery: Delivery) -> None:
        if self._fell_behind and isinstance(delivery, Failed):
            delivery = Failed(f"the answer was given up: {UNREAD_MAX} parts of it were not read", 499)
        self._unread.append(delivery)
        if self._reader and not self._reader.done():
            self._reader.set_result(None)
        if len(self._unread) > UNREAD_MAX and not self._fell_behind:
            self._fell_behind = True
            asyncio.get_running_loop().call_soon(self._leave, ClientLeft(self.request))
