"""Makes requests this proxy's own before it answers them, many with one command.

A claim that finds no command on its way is sent at once. Those that come while one is go together in the next: what a
command costs this process hardly depends on how many are in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from time import time

import msgspec
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from aegis.core.clock import NS_PER_MS
from aegis.runtime.store.connection import FAILURES
from aegis.runtime.store.keys import Keys
from aegis.runtime.store.scripts import CLAIM
from aegis.runtime.watched import cancelled
from proxy.http.records import Asked

_AT_ONCE = 256  # claims in one command

Answer = tuple[str, bytes, list[bytes]]
"""A word of CLAIM's, the seed, and the batches recorded."""


@dataclass(frozen=True, slots=True, eq=False)
class _Claim:
    keys: tuple[str, str]
    words: tuple[str | bytes | int, ...]
    answer: asyncio.Future[Answer]


class Claims:
    """The claims of one proxy."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        owner: str,
        ttl_ms: int,
        *,
        up: asyncio.Event,
        failed: Callable[[BaseException], None],
    ) -> None:
        """`up` is set while the server can be used; `failed` is told why a command did, and clears it."""
        self._keys = keys
        self._common = (owner, ttl_ms, keys.proxies)
        self._up = up
        self._failed = failed
        self._script = redis.register_script(CLAIM)
        self._waiting: dict[_Claim, None] = {}  # on their way, and to be sent
        self._sending: asyncio.Task[None] | None = None

    async def claim(self, asked: Asked, mode: str = "") -> Answer:
        """Tries until it is told; who calls has a time limit, and claims no request a second time meanwhile. `again`:
        also what is finished."""
        claim = _Claim(
            (self._keys.request(asked.request), self._keys.tokens(asked.request)),
            (asked.fingerprint, mode, *fields(asked, asked.sampling.seed)),
            asyncio.get_running_loop().create_future(),
        )
        self._waiting[claim] = None
        if self._sending is None or self._sending.done():
            # A task of its own: whoever is cancelled takes no command of others along.
            self._sending = asyncio.create_task(self._send_all())
        try:
            return await claim.answer
        finally:
            self._waiting.pop(claim, None)

    async def close(self) -> None:
        """Who still waits is told nothing any more."""
        if self._sending:
            await cancelled(self._sending)

    async def _send_all(self) -> None:
        while self._waiting:
            await self._up.wait()
            if claims := list(islice(self._waiting, _AT_ONCE)):
                await self._send(claims)

    async def _send(self, claims: list[_Claim]) -> None:
        """What fails stays to be sent."""
        try:
            answers = await self._script(
                keys=[key for claim in claims for key in claim.keys],
                args=[*self._common, *(word for claim in claims for word in claim.words)],
            )
            for claim, (word, seed, batches) in zip(claims, answers, strict=True):
                self._answered(claim, word.decode(), seed, batches)
        except FAILURES as error:
            self._failed(error)
        except Exception as error:  # noqa: BLE001 - a bug of ours costs these requests, not those that come
            for claim in claims:
                self._waiting.pop(claim, None)
                if not claim.answer.done():
                    claim.answer.set_exception(error)

    def _answered(self, claim: _Claim, word: str, seed: bytes, batches: list[bytes]) -> None:
        if word == "failed":
            self._failed(ResponseError(seed.decode(errors="replace")))
            return
        self._waiting.pop(claim, None)
        if not claim.answer.done():
            claim.answer.set_result((word, seed, batches))


def fields(asked: Asked, seed: int) -> list[str | bytes | int]:
    """What is recorded of a call besides its tokens, its owner and its state; equally many of every call."""
    return [
        *("model", asked.model),
        *("arrival_ms", round(time() * 1000)),
        *("ttft_ms", asked.slo.ttft_ns // NS_PER_MS),
        *("tbt_ms", asked.slo.tbt_ns // NS_PER_MS),
        *("sampling", msgspec.json.encode(asked.sampling)),
        *("seed", seed),
        *("sequences", asked.sequences),
    ]
