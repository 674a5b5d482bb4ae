"""The handle of one sequence: the HTTP layer reads its deliveries and may cancel it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from aegis.core.ids import RequestId
from proxy.http.market import Delivery, Failed, Finished
from proxy.live.unread_answers import AnswerBytes, UnreadAnswers, bytes_of
from proxy.routing.events import ClientLeft

UNREAD_MAX = 4096
"""The number of deliveries that wait for a client that reads more slowly than its answer is made; beyond it, the client
gets no more."""

_GIVEN_UP = 499


class LiveSequenceHandle:
    """One sequence's deliveries. Implements `proxy.http.market.SequenceHandle` and
    `proxy.live.unread_answers.UnreadAnswer`."""

    def __init__(
        self,
        request: RequestId,
        leave: Callable[[ClientLeft], None],
        before: Callable[[RequestId], int | None],
        unread_answers: UnreadAnswers,
        among: LiveSequenceHandle | None = None,
    ) -> None:
        """`among`: another one of the same answer."""
        self.request = request
        self.share: AnswerBytes = among.share if among else AnswerBytes()
        self._leave = leave
        self._before = before
        self._unread_answers = unread_answers
        self._unread: list[Delivery] = []  # few, as a rule: an empty deque has room for 64
        self._reader: asyncio.Future[None] | None = None  # waits for more
        self._awaited = False  # the first unread one: it is not counted, because its reader is on the way
        self._fell_behind = False
        self._given_up = False
        unread_answers.join(self)

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while True:
            while not self._unread:
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            delivery = self._unread.pop(0)
            if self._awaited:
                self._awaited = False
            else:
                self._unread_answers.grow(self.share, -bytes_of(delivery))
            yield delivery
            if isinstance(delivery, Finished | Failed):
                return

    def before(self) -> int | None:
        return self._before(self.request)

    def cancel(self, *, satisfied: bool = False) -> None:
        self._leave(ClientLeft(self.request, satisfied))
        if self._unread:
            self._keep(self._unread[-1])

    def give_up(self, why: str) -> None:
        if not self._given_up:
            self._given_up = True
            self._keep(Failed(f"the answer was given up: {why}", _GIVEN_UP))
            self._leave(ClientLeft(self.request))

    def put(self, delivery: Delivery) -> None:
        if self._given_up:
            return
        if self._fell_behind and isinstance(delivery, Failed):
            delivery = Failed(f"the answer was given up: {UNREAD_MAX} parts of it were not read", _GIVEN_UP)
        self._add(delivery)
        if len(self._unread) > UNREAD_MAX and not self._fell_behind:
            self._fell_behind = True
            asyncio.get_running_loop().call_soon(self._leave, ClientLeft(self.request))

    def _add(self, delivery: Delivery) -> None:
        self._unread.append(delivery)
        if self._reader and not self._reader.done():
            self._reader.set_result(None)
            self._awaited = True
        else:
            self._unread_answers.grow(self.share, bytes_of(delivery))

    def _keep(self, last: Delivery) -> None:
        """Keeps this delivery and no other."""
        if self._awaited:
            self._unread.pop(0)
            self._awaited = False
        self._unread_answers.grow(self.share, -sum(map(bytes_of, self._unread)))
        self._unread.clear()
        self._add(last)
