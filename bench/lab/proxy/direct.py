"""The instance asked as a proxy asks it, without one: what is left of a request's time where no proxy is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import msgspec
from msgspec import Struct

from aegis.core.ids import ModelId, ProxyId, nth_request
from aegis.core.messages import FromInstance, Greeting, Prefilled, Submit, Tokens
from aegis.core.request import Job, Sampling
from aegis.transport.links import Hub, Spoke
from aegis.transport.node_messages import Joined, ToProxy
from bench.lab.proxy.backend import IDENTITY
from bench.lab.proxy.client import Took
from bench.lab.proxy.model import VECTORS

_NUMBER = ProxyId(2)
_PROMPT = (1,) * 64
_WAIT_S = 60.0


class _Body(Struct):
    """The body of a request of any route; the most tokens of an answer have another name in each."""

    model: ModelId
    max_tokens: int = 1
    max_output_tokens: int = 0

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.max_output_tokens or self.max_tokens, pools=self.model == VECTORS)


class Direct:
    """Implements `Asker`."""

    def __init__(self, hub: Hub[FromInstance]) -> None:
        self._hub = hub
        self._count = count(1)

    async def greeted(self) -> None:
        async with asyncio.timeout(_WAIT_S):
            _, messages = await self._hub.receive()
        assert isinstance(messages[0], Greeting)

    async def ask(self, body: bytes) -> Took:
        """Sends an instance what a proxy would tell it of this body of a client's, and waits for the answer."""
        asked = msgspec.json.decode(body, type=_Body)
        request, sent_ns, first_ns = nth_request(_NUMBER, next(self._count)), time.perf_counter_ns(), 0
        job = Job(request, 1, asked.model, _PROMPT, asked.sampling, time.monotonic_ns())
        self._hub.send(IDENTITY, [Submit(job)])
        async with asyncio.timeout(_WAIT_S):
            while True:
                _, messages = await self._hub.receive()
                now_ns = time.perf_counter_ns()
                if any(isinstance(message, Prefilled | Tokens) for message in messages):
                    first_ns = first_ns or now_ns
                if any(isinstance(message, Tokens) and message.finish for message in messages):
                    return Took(first_ns - sent_ns, now_ns - sent_ns)


@asynccontextmanager
async def open_direct(node: str, directory: Path) -> AsyncIterator[Direct]:
    """`node` is the address of the backend's node, `directory` for a socket."""
    hub: Hub[FromInstance] = Hub(f"ipc://{directory}/direct", FromInstance)
    spoke: Spoke[ToProxy] = Spoke(node, f"direct/{_NUMBER}", ToProxy)
    try:
        spoke.send([Joined(hub.address)])
        direct = Direct(hub)
        await direct.greeted()
        yield direct
    finally:
        spoke.close()
        hub.close()
