"""Responses that are kept for later requests, in the store that all proxies share.

Clients do not wait until what they were answered is kept: responses are written soon afterwards, many with one command,
or, if the server is away, as soon as it is back. Until then this proxy knows them, and other proxies look a second time
for what they do not find.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Collection
from typing import TypeVar

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from aegis.core.errors import UserError
from aegis.metadata.connection import FAILURES, why
from aegis.metadata.keys import Keys
from aegis.metadata.lua_scripts import KEEP
from aegis.metadata.membership import Membership
from aegis.telemetry.logs import log

_ROUND_S = 0.025
_LOOK_AGAIN_S = 0.1
_WRITTEN_LATER_BYTES_MAX = 256 << 10  # of one response; a command with it would delay others
_UNWRITTEN_BYTES_MAX = 8 << 20
_COMMAND_BYTES = 256 << 10

_Answer = TypeVar("_Answer")
_logger = logging.getLogger(__name__)


class StoredResponses:
    """Implements `ResponseStore` of `proxy.http.responses.stored_responses`. The server drops what is too old, and what
    was not used for longest where its memory is bounded."""

    def __init__(self, redis: Redis, keys: Keys, membership: Membership, *, ttl_s: float) -> None:
        self._redis = redis
        self._keys = keys
        self._membership = membership
        self._ttl_ms = round(ttl_s * 1000)
        self._script = redis.register_script(KEEP)
        self._unwritten: dict[str, bytes] = {}  # with those of the present command
        self._unwritten_bytes = 0
        self._has_unwritten = asyncio.Event()
        self._one_writer = asyncio.Lock()
        self._writing: Collection[str] = ()  # keys of the present command

    async def keep(self, key: str, stored: bytes) -> None:
        await self._take_back(key)
        await self._told(self._redis.set(self._keys.response(key), stored, px=self._ttl_ms))

    async def keep_soon(self, key: str, stored: bytes) -> None:
        nbytes = len(stored)
        if nbytes > _WRITTEN_LATER_BYTES_MAX or self._unwritten_bytes + nbytes > _UNWRITTEN_BYTES_MAX:
            await self.keep(key, stored)
            return
        self._forget(key)
        self._unwritten[key] = stored
        self._unwritten_bytes += nbytes
        self._has_unwritten.set()

    async def find(self, key: str) -> bytes | None:
        if (unwritten := self._unwritten.get(key)) is not None:
            return unwritten
        found = await self._find(key)
        if found is None:
            await asyncio.sleep(_LOOK_AGAIN_S)
            found = await self._find(key)
        return found

    async def remove(self, key: str) -> bool:
        unwritten = await self._take_back(key)
        removed = await self._told(self._redis.delete(self._keys.response(key)))
        return unwritten or bool(removed)

    async def write_for_ever(self) -> None:
        while True:
            await self._has_unwritten.wait()
            await asyncio.sleep(_ROUND_S)
            await self._membership.up.wait()
            await self.write()

    async def write(self) -> None:
        """All that is unwritten now. What the server does not answer of stays to be written; what it refuses is
        dropped."""
        self._has_unwritten.clear()
        left = list(self._unwritten)
        while left:
            async with self._one_writer:
                batch, nbytes = dict[str, bytes](), 0
                while left and nbytes < _COMMAND_BYTES:
                    if (key := left.pop()) in self._unwritten:
                        batch[key] = self._unwritten[key]
                        nbytes += len(batch[key])
                if batch and not await self._write(batch):
                    self._has_unwritten.set()
                    return

    async def close(self, timeout_s: float = 1.0) -> None:
        """Writes what is left, for a limited time. What is not written then is lost."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.write()
        if self._unwritten:
            _tell_lost(len(self._unwritten), "the server was away to the end")

    async def _write(self, batch: dict[str, bytes]) -> bool:
        """Whether the server answered."""
        self._writing = batch
        try:
            await self._script(keys=[self._keys.response(key) for key in batch], args=[self._ttl_ms, *batch.values()])
        except FAILURES as error:
            self._membership.report_failure()
            if not isinstance(error, ResponseError):
                return False
            _tell_lost(len(batch), why(error))
        finally:
            self._writing = ()
        for key, stored in batch.items():
            if self._unwritten.get(key) is stored:
                self._forget(key)
        return True

    async def _take_back(self, key: str) -> bool:
        """Whether it was unwritten. It is not written any more, or has been: what comes next is not undone by it."""
        unwritten = self._forget(key)
        if key in self._writing:
            async with self._one_writer:
                pass
        return unwritten

    def _forget(self, key: str) -> bool:
        """Whether it was unwritten."""
        stored = self._unwritten.pop(key, None)
        self._unwritten_bytes -= len(stored or b"")
        return stored is not None

    async def _find(self, key: str) -> bytes | None:
        found = await self._told(self._redis.get(self._keys.response(key)))
        assert not isinstance(found, str)
        return found

    async def _told(self, answer: Awaitable[_Answer]) -> _Answer:
        """Raises UserError."""
        try:
            return await answer
        except FAILURES as error:
            self._membership.report_failure()
            message = f"kept responses cannot be reached: {why(error)}"
            raise UserError(message, status=503, code="store_unavailable", kind="server_error") from None


def _tell_lost(responses: int, reason: str) -> None:
    log(_logger, logging.WARNING, "responses are not kept", {"responses": responses, "reason": reason})
