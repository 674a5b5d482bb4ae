"""What is kept of responses, so that a later request can go on from one, or see it again: for a while, and not much."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol
from urllib.parse import quote

import msgspec
from msgspec import Raw, Struct

from proxy.http.market import ServerQueries

RESPONSE_BYTES_MAX = 4 << 20
"""Of one response with its conversation; a larger one is not kept."""

_BYTES_MAX = 64 << 20
RESPONSES_TTL_S = 3600.0


class StoredResponse(Struct, frozen=True):
    """`response` as its client got it, and the conversation up to it, without instructions."""

    response: Raw
    conversation: list[dict[str, Any]]


class ResponseStore(Protocol):
    """The responses of all proxies that share it, by key."""

    async def keep(self, key: str, stored: bytes) -> None:
        """Raises UserError: 503 where it cannot be reached."""
        ...

    async def keep_soon(self, key: str, stored: bytes) -> None:
        """As `keep`, but it may be written later: every proxy finds it, though it is lost with this one if that dies at
        once."""
        ...

    async def find(self, key: str) -> bytes | None:
        """None where there is none, or it was too long ago. Raises UserError: 503."""
        ...

    async def remove(self, key: str) -> bool:
        """Whether there was one. Raises UserError: 503."""
        ...


def key_of(caller: str, response_id: str) -> str:
    """Callers see nothing of each other's responses."""
    return f"{quote(caller, safe='')}/{quote(response_id, safe='')}"


encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(StoredResponse).decode


class ResponseMemory:
    """Those of one process, in its memory. Implements `ResponseStore`. The oldest make room for new ones."""

    def __init__(
        self, ttl_s: float = RESPONSES_TTL_S, *, bytes_max: int = _BYTES_MAX, clock: Callable[[], float] = monotonic
    ) -> None:
        self._bytes_left = bytes_max
        self._ttl_s = ttl_s
        self._clock = clock
        self._stored: OrderedDict[str, tuple[float, bytes]] = OrderedDict()

    async def keep(self, key: str, stored: bytes) -> None:
        self._drop(key)
        self._stored[key] = (self._clock() + self._ttl_s, stored)
        self._bytes_left -= len(stored)
        for oldest in list(self._stored):
            if self._bytes_left >= 0 and not self._is_over(oldest):
                break
            self._drop(oldest)

    keep_soon = keep

    async def find(self, key: str) -> bytes | None:
        if self._is_over(key):
            self._drop(key)
        _, stored = self._stored.get(key, (0.0, None))
        return stored

    async def remove(self, key: str) -> bool:
        found = await self.find(key) is not None
        self._drop(key)
        return found

    def _is_over(self, key: str) -> bool:
        return key in self._stored and self._stored[key][0] <= self._clock()

    def _drop(self, key: str) -> None:
        if key in self._stored:
            self._bytes_left += len(self._stored.pop(key)[1])


class NodeResponses:
    """Those that the node keeps for all its proxies, where they share no other store. Implements `ResponseStore`."""

    def __init__(self, queries: ServerQueries) -> None:
        self._queries = queries

    async def keep(self, key: str, stored: bytes) -> None:
        await self._queries.keep_response(key, stored)

    keep_soon = keep

    async def find(self, key: str) -> bytes | None:
        return await self._queries.find_response(key)

    async def remove(self, key: str) -> bool:
        return await self._queries.remove_response(key)
