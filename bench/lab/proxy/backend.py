"""A process that is to a proxy what a node and an instance are, on the same wires, but that runs nothing: the tokens of
a step are there at once.

Started as `python -m bench.lab.proxy.backend` with its settings as JSON on standard input. Whoever joins is told of the
models, and is greeted as by an instance that prefills and decodes. Requests for `SILENT` are never answered. It prints
a line when it listens.
"""

from __future__ import annotations

import asyncio
import struct
import sys
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from time import time

import msgspec
import uvloop
from msgspec import Raw, Struct

from aegis.core.ids import RequestId
from aegis.core.limits import UNLIMITED
from aegis.core.messages import Cancel, FromInstance, Greeting, Prefilled, Started, Submit, ToInstance, Tokens
from aegis.core.model import ModelSpec
from aegis.core.request import Job, Token
from aegis.core.role import Role
from aegis.transport.links import Hub, Spoke
from aegis.transport.node_messages import Card, FromProxy, Joined, LookUp, NodeAnswer, NodeCall, PrefixFound
from bench.lab.proxy.model import SILENT, TOKEN, VECTOR
from proxy.routing.events import ModelUp

IDENTITY = "mixed-0/1"
"""The instance's name and incarnation."""

_CAPACITY_TOKENS = 1 << 24
_VECTOR = Token(0, vector=struct.pack(f"<{len(VECTOR)}f", *VECTOR))


class BackendSettings(Struct, frozen=True):
    """`address` is the node's."""

    address: str
    specs: tuple[ModelSpec, ...]


@dataclass(slots=True)
class _Instance:
    """An instance as one proxy sees it."""

    link: Spoke[ToInstance]
    waiting: dict[RequestId, Job] = field(default_factory=dict)
    running: dict[RequestId, tuple[Job, int]] = field(default_factory=dict)  # and the tokens made so far

    def hear(self, messages: Sequence[ToInstance]) -> None:
        for message in messages:
            match message:
                case Submit(job) if job.model != SILENT:
                    self.waiting[job.request] = job
                case Cancel(request):
                    self.waiting.pop(request, None)
                    self.running.pop(request, None)

    def step(self) -> list[FromInstance]:
        """A token of each request."""
        said: list[FromInstance] = []
        for request, (job, made) in list(self.running.items()):
            finish = job.sampling.finish(made, TOKEN)
            said.append(Tokens(request, job.attempt, made, (Token(TOKEN),), finish))
            if finish:
                del self.running[request]
            else:
                self.running[request] = job, made + 1
        for request, job in self.waiting.items():
            said += self._begin(request, job)
        self.waiting.clear()
        return said

    def _begin(self, request: RequestId, job: Job) -> list[FromInstance]:
        finish, started = job.sampling.finish(0, TOKEN), Started(request, job.attempt)
        if finish:
            token = _VECTOR if job.sampling.pools else Token(TOKEN)
            return [started, Tokens(request, job.attempt, 0, (token,), finish)]
        self.running[request] = job, 1
        return [started, Prefilled(request, job.attempt, Token(TOKEN), None, 0)]


class Backend:
    """The node, and an instance for each proxy."""

    def __init__(self, settings: BackendSettings) -> None:
        self._specs = settings.specs
        self._hub: Hub[FromProxy] = Hub(settings.address, FromProxy)
        self._working: set[asyncio.Task[None]] = set()
        sys.stdout.write("listening\n")
        sys.stdout.flush()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            identity, messages = await self._hub.receive()
            for message in messages:
                self._hear(identity, message)

    def _hear(self, identity: str, message: FromProxy) -> None:
        match message:
            case Joined(address):
                self._hub.send(identity, [told for spec in self._specs for told in (_card(spec), _up(spec))])
                instance = _Instance(Spoke(address, IDENTITY, ToInstance))
                instance.link.send([Greeting(Role.MIXED)])
                some = asyncio.Event()
                self._work(_listen(instance, some))
                self._work(_decode(instance, some))
            case LookUp(call_id):
                self._hub.send(identity, [PrefixFound(call_id, None)])
            case NodeCall(call_id, "healthy"):
                self._hub.send(identity, [NodeAnswer(call_id, Raw(msgspec.msgpack.encode((True, ""))))])

    def _work(self, work: Coroutine[None, None, None]) -> None:
        self._working.add(asyncio.create_task(work))


async def _listen(instance: _Instance, some: asyncio.Event) -> None:
    while True:
        instance.hear(await instance.link.receive())
        some.set()


async def _decode(instance: _Instance, some: asyncio.Event) -> None:
    """Each step's tokens are sent by themselves, as an instance does."""
    while True:
        await some.wait()
        while said := instance.step():
            instance.link.send(said)
            await asyncio.sleep(0)
        some.clear()


def _card(spec: ModelSpec) -> Card:
    return Card(spec, _CAPACITY_TOKENS, round(time()), "ready", "", "cached", 0, UNLIMITED, False)


def _up(spec: ModelSpec) -> ModelUp:
    return ModelUp(spec, _CAPACITY_TOKENS)


def main() -> None:
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=BackendSettings)

    async def run() -> None:
        await Backend(settings).run()

    uvloop.run(run())


if __name__ == "__main__":
    main()
