"""The two leases of a proxy: one says that it lives, the other that its cluster alone uses the prefix. Both are renewed
as long as they hold.

The same renewal shows whether the server can be used at all. While it cannot, `up` is not set; whoever finds out first
calls `report_failure()`, and the next renewal comes at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from secrets import token_hex

from redis.asyncio import Redis

from aegis.core.errors import UserError
from aegis.metadata.connection import FAILURES, why
from aegis.metadata.keys import SCHEMA, Keys
from aegis.metadata.lua_scripts import ENTER, LEAVE
from aegis.telemetry.logs import log

_logger = logging.getLogger(__name__)

LEASE_MS = 3_000
"""A proxy is dead when it has not renewed for so long."""
_RENEWAL_S = 1.0
_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a proxy. `cluster` is common to the proxies of one launch, of which one founded it; an
    `incarnation` is never used again."""

    cluster: str
    proxy: str
    incarnation: str
    is_first: bool

    @classmethod
    def first(cls, proxy: str = "proxy-0") -> Identity:
        """The first proxy of a new cluster."""
        return cls(token_hex(8), proxy, token_hex(8), is_first=True)

    @classmethod
    def joining(cls, cluster: str, proxy: str, number: int) -> Identity:
        """A further one; `number` is its process's alone in this cluster."""
        return cls(cluster, proxy, f"{cluster}-{number}", is_first=False)

    @property
    def owner(self) -> str:
        return f"{self.proxy}/{self.incarnation}"


class Membership:
    """The leases of one proxy."""

    def __init__(self, redis: Redis, keys: Keys, identity: Identity, *, place: str) -> None:
        """`place` is how messages call the server."""
        self.up = asyncio.Event()
        self._redis = redis
        self._keys = keys
        self._identity = identity
        self._place = place
        self._enter = redis.register_script(ENTER)
        self._leave = redis.register_script(LEAVE)
        self._in_doubt = asyncio.Event()
        self.reason = ""  # the reason if the server cannot be used

    async def enter(self) -> None:
        """Takes the leases. Waits for that of a cluster that was killed to run out. Raises UserError if another one
        lives, the schema is foreign, or the server cannot be used."""
        last_ms = LEASE_MS + 1
        while True:
            try:
                word, value, left_ms = await self._renew()
            except FAILURES as error:
                raise UserError(f"--redis {self._place}: {why(error)}") from None
            if word == "entered":
                self.up.set()
                return
            if word == "schema" or not 0 <= left_ms <= last_ms:
                raise UserError(self._refusal(word, value))
            last_ms = left_ms
            await asyncio.sleep(_RETRY_S)

    async def renew_for_ever(self) -> None:
        while True:
            await self._next_renewal()
            reason = await self._failure()
            if not reason:
                self._became_up()
                continue
            if reason != self.reason:
                log(_logger, logging.ERROR, "Redis cannot be used", {"redis": self._place, "why": reason})
            self.reason = reason
            self.up.clear()

    def report_failure(self) -> None:
        """A command failed."""
        self.up.clear()
        self._in_doubt.set()

    async def declare_dead(self, proxy: str, number: int) -> None:
        """This further proxy's process has ended: what it answered may be taken over before its lease runs out."""
        owner = Identity.joining(self._identity.cluster, proxy, number).owner
        with contextlib.suppress(*FAILURES):
            await self._redis.delete(self._keys.proxy(owner))

    async def leave(self) -> None:
        with contextlib.suppress(*FAILURES):
            await self._redis.delete(self._keys.proxy(self._identity.owner))
            if self._identity.is_first:
                await self._leave(keys=[self._keys.cluster], args=[self._identity.cluster])

    async def _next_renewal(self) -> None:
        """A failed server is asked more often, though not as often as it fails."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_RENEWAL_S if self.up.is_set() else _RETRY_S):
                await self._in_doubt.wait()
        if self._in_doubt.is_set():
            self._in_doubt.clear()
            await asyncio.sleep(_RETRY_S)

    async def _failure(self) -> str:
        """The reason why the leases are not held; empty if they are."""
        try:
            word, value, _ = await self._renew()
        except FAILURES as error:
            return why(error)
        return "" if word == "entered" else self._refusal(word, value)

    def _became_up(self) -> None:
        if self.reason:
            log(_logger, logging.INFO, "Redis can be used again", {"redis": self._place})
        self.reason = ""
        if not self._in_doubt.is_set():
            self.up.set()

    async def _renew(self) -> tuple[str, str, int]:
        keys = self._keys
        word, value, left_ms = await self._enter(
            keys=[keys.schema, keys.cluster, keys.proxy(self._identity.owner)],
            args=[SCHEMA, self._identity.cluster, LEASE_MS, self._identity.proxy],
        )
        return word.decode(), value.decode(), left_ms

    def _refusal(self, word: str, value: str) -> str:
        if word == "schema":
            trouble = f"keys under the prefix '{self._keys.prefix}' have schema {value[:20]}, this aegis has {SCHEMA}"
        else:
            trouble = f"another aegis is using the prefix '{self._keys.prefix}'"
        return f"--redis {self._place}: {trouble}; set another --redis-prefix"
