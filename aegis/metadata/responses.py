"""Responses that are kept for later requests, in the store that all proxies share."""

from __future__ import annotations

from redis.asyncio import Redis

from aegis.core.errors import UserError
from aegis.metadata.connection import FAILURES, why
from aegis.metadata.keys import Keys
from aegis.metadata.membership import Membership


class StoredResponses:
    """Implements `ResponseStore` of `proxy.http.responses.stored_responses`. The server drops what is too old, and what
    was not used for longest where its memory is bounded."""

    def __init__(self, redis: Redis, keys: Keys, membership: Membership, *, ttl_s: float) -> None:
        self._redis = redis
        self._keys = keys
        self._membership = membership
        self._ttl_ms = round(ttl_s * 1000)

    async def keep(self, key: str, stored: bytes) -> None:
        try:
            await self._redis.set(self._keys.response(key), stored, px=self._ttl_ms)
        except FAILURES as error:
            raise self._unavailable(error) from None

    async def find(self, key: str) -> bytes | None:
        try:
            found = await self._redis.get(self._keys.response(key))
        except FAILURES as error:
            raise self._unavailable(error) from None
        assert not isinstance(found, str)
        return found

    async def remove(self, key: str) -> bool:
        try:
            return bool(await self._redis.delete(self._keys.response(key)))
        except FAILURES as error:
            raise self._unavailable(error) from None

    def _unavailable(self, error: BaseException) -> UserError:
        self._membership.report_failure()
        message = f"kept responses cannot be reached: {why(error)}"
        return UserError(message, status=503, code="store_unavailable", kind="server_error")
