"""Makes requests this proxy's own before it answers them, many with one command.

A claim is sent at once if no command is on its way. Claims that come while one is go together in the next: the cost of
a command for this process hardly depends on how many are in it.

A caller may leave before its claim is answered. The server may have carried the claim out, or may yet: as soon as it
can be asked, the requests of such a claim are given back, so that a retry at another proxy is served.
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
from aegis.metadata.connection import FAILURES
from aegis.metadata.keys import Keys
from aegis.metadata.lua_scripts import CLAIM, GIVE_BACK
from aegis.process.tasks import cancelled
from proxy.http.call_records import RecordedCall

_AT_ONCE = 256  # claims in one command

Answer = tuple[str, bytes, list[bytes]]
"""A word of CLAIM's, the seed, and the batches recorded."""


@dataclass(slots=True, eq=False)
class _Claim:
    keys: tuple[str, str]
    words: tuple[str | bytes | int, ...]
    answer: asyncio.Future[Answer]
    sent: bool = False


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
        wanted: Callable[[str], bool],
    ) -> None:
        """`up` is set while the server can be used; `failed` is told why a command did, and clears it. `wanted` says
        whether the call of a key is being claimed or answered here."""
        self._keys = keys
        self._common = (owner, ttl_ms, keys.proxies)
        self._up = up
        self._failed = failed
        self._wanted = wanted
        self._script = redis.register_script(CLAIM)
        self._give_back_script = redis.register_script(GIVE_BACK)
        self._waiting: dict[_Claim, None] = {}  # on their way, and to be sent
        self._left: dict[str, None] = {}  # keys of calls whose claim was sent and is not waited for any more
        self._sending: asyncio.Task[None] | None = None

    async def claim(self, asked: RecordedCall, mode: str = "") -> Answer:
        """Tries until there is an answer; the caller has a time limit, and claims no request a second time meanwhile.
        Mode `again`: also finished requests."""
        claim = _Claim(
            (self._keys.request(asked.key), self._keys.tokens(asked.key)),
            (asked.fingerprint, mode, *fields(asked, asked.sampling.seed)),
            asyncio.get_running_loop().create_future(),
        )
        self._waiting[claim] = None
        self._go_on()
        try:
            return await claim.answer
        except asyncio.CancelledError:
            if claim.sent:
                self._left[asked.key] = None
                self._go_on()
            raise
        finally:
            self._waiting.pop(claim, None)

    def _go_on(self) -> None:
        """A task of its own, so that a caller that is cancelled cancels no command of others."""
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())

    async def close(self) -> None:
        """Callers that still wait get no answer any more."""
        if self._sending:
            await cancelled(self._sending)

    async def _send_all(self) -> None:
        while self._waiting or self._left:
            await self._up.wait()
            if claims := list(islice(self._waiting, _AT_ONCE)):
                await self._send(claims)
            if self._left and self._up.is_set():
                await self._give_back(list(islice(self._left, _AT_ONCE)))

    async def _send(self, claims: list[_Claim]) -> None:
        """Claims that fail stay to be sent."""
        for claim in claims:
            claim.sent = True
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

    async def _give_back(self, calls: list[str]) -> None:
        """Claims that fail stay to be given back."""
        keys = [self._keys.request(call) for call in calls if not self._wanted(call)]
        try:
            if keys:
                await self._give_back_script(keys=keys, args=[self._common[0]])
        except FAILURES as error:
            self._failed(error)
            return
        for call in calls:
            del self._left[call]

    def _answered(self, claim: _Claim, word: str, seed: bytes, batches: list[bytes]) -> None:
        if word == "failed":
            self._failed(ResponseError(seed.decode(errors="replace")))
            return
        self._waiting.pop(claim, None)
        if not claim.answer.done():
            claim.answer.set_result((word, seed, batches))


def fields(asked: RecordedCall, seed: int) -> list[str | bytes | int]:
    """The recorded fields of a call besides its tokens, its owner and its state; equally many of every call."""
    return [
        *("model", asked.model),
        *("arrival_ms", round(time() * 1000)),
        *("ttft_ms", asked.slo.ttft_ns // NS_PER_MS),
        *("tbt_ms", asked.slo.tbt_ns // NS_PER_MS),
        *("sampling", msgspec.json.encode(asked.sampling)),
        *("seed", seed),
        *("sequences", asked.sequences),
    ]
