"""A bound on the bytes of large bodies that a proxy reads at a time, so that no client can fill its memory by sending
many.

A body takes several times its size in memory until its text is tokenized. Bodies that wait are not read, so they take
nothing but the buffers of their connections. A client whose turn it is has to send, or makes room for others.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Scope

from aegis.core.errors import UserError

SMALL_BYTES = 64 << 10
"""A body up to this is read at once."""

LARGE_BYTES_MAX = 8 << 20
WAITING_MAX = 64
"""So many bodies wait at most, and half as many of one caller. Each has some 300 KiB in buffers of its connection, and
while it is not read nobody sees that its client has left."""

WAIT_S = 30.0
SEND_S = 10.0
SEND_BYTES_PER_S = 256 << 10
_HELD = "aegis.body"


class LargeBodies:
    """The large bodies of one proxy. Callers take turns; of one caller's bodies the first is next. One caller has half
    of the room, or one body."""

    def __init__(self, bytes_max: int, *, wait_s: float = WAIT_S) -> None:
        """Has room for one body of `bytes_max` at least, the largest there is."""
        self._free = max(LARGE_BYTES_MAX, bytes_max)
        self._share = self._free // 2
        self._wait_s = wait_s
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()  # next turn first

    async def hold(self, scope: Scope, caller: str, nbytes: int) -> None:
        """Returns when there is room for the body of this request, which `release` gives back. Raises UserError: 503
        where that takes too long, or too many wait."""
        waiting = [len(bodies) for bodies in self._waiting.values()]
        if sum(waiting) >= WAITING_MAX or len(self._waiting.get(caller, ())) >= WAITING_MAX // 2:
            raise _too_many()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, deque()).append((nbytes, turn))
        self._give()
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self.give_back(caller, nbytes)
            turn.cancel()
            self._give()
            if isinstance(error, TimeoutError):
                raise _too_many() from None
            raise
        scope["state"][_HELD] = (self, caller, nbytes)

    def give_back(self, caller: str, nbytes: int) -> None:
        """Makes room again; `release` calls it for a request."""
        self._free += nbytes
        self._held[caller] -= nbytes
        if not self._held[caller]:
            del self._held[caller]
        self._give()

    def _give(self) -> None:
        """A body that does not fit yet keeps its turn: smaller ones of others would pass it for ever."""
        while caller := next(filter(self._may_have_more, list(self._waiting)), None):
            nbytes, turn = self._waiting[caller][0]
            if nbytes > self._free:
                return
            self._waiting[caller].popleft()
            self._waiting.move_to_end(caller)
            self._free -= nbytes
            self._held[caller] += nbytes
            turn.set_result(None)

    def _may_have_more(self, caller: str) -> bool:
        """Whether a body of the caller waits, and is within its share."""
        bodies = self._waiting[caller]
        while bodies and bodies[0][1].done():
            bodies.popleft()
        if not bodies:
            del self._waiting[caller]
            return False
        held = self._held.get(caller, 0)
        return not held or held + bodies[0][0] <= self._share


def _too_many() -> UserError:
    message = "too many large bodies at once; try again later"
    return UserError(message, status=503, code="large_bodies", kind="server_error")


@asynccontextmanager
async def sent_in_time(nbytes: int) -> AsyncIterator[None]:
    """Raises UserError: 408 where the block, which reads so much, takes too long while others wait for room."""
    within_s = SEND_S + nbytes / SEND_BYTES_PER_S
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError:
        message = f"a body of {nbytes} bytes has to be there within {within_s:.0f} s"
        raise UserError(message, status=408, code="request_timeout") from None


def release(scope: Scope) -> None:
    """Nothing of the request's body is needed any more. Harmless where that was said before, or it was small."""
    bodies, caller, nbytes = scope["state"].pop(_HELD, (None, "", 0))
    if bodies:
        bodies.give_back(caller, nbytes)
