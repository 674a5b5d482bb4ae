"""A live run in virtual time: the real shells and the real market over scripted engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec.structs import replace

from aegis.core.clock import NS_PER_S
from aegis.core.effects import Effect, Run
from aegis.core.ids import InstanceId, ProxyId, RequestId
from aegis.core.messages import Shutdown
from aegis.core.model import ModelSpec, Slo
from aegis.core.request import Sampling
from aegis.core.role import Role
from aegis.instance.parts import InstanceParts
from aegis.instance.process import Instance
from aegis.launcher.live_market import LocalNode
from aegis.launcher.placing import Placing
from aegis.models.sources import Source
from aegis.models.terms import Terms
from aegis.node.devices import Devices
from aegis.node.node import Node
from aegis.policies import Site
from aegis.sim.event_queue import NEVER_NS
from aegis.sim.flows import Bus, Link
from aegis.sim.instance import END
from aegis.sim.market import SimRequest
from aegis.sim.simulation import ADDRESS_PAGES, PAGE_BYTES, Pool, stream_words
from aegis.sim.timeline_semaphores import TimelineSemaphores
from aegis.telemetry.decisions import DecisionLog
from aegis.telemetry.history import History
from decode.core import DecodeCore
from memory.ledger import Ledger
from prefill.core import PrefillCore
from proxy.http.market import Delta, Failed, Finished
from proxy.live.proxy import Proxy
from proxy.live.sequence_handle import LiveSequenceHandle
from proxy.routing.events import MoveModel
from proxy.routing.router import Router
from tests.parity.conductor import Actor, Conductor
from tests.parity.stand_ins import (
    CountedPool,
    NoDevice,
    Processes,
    ScriptedEngine,
    ScriptedMover,
    Wire,
    host,
    no_images,
)
from tests.parity.virtual_loop import VirtualLoop

PROXY = ProxyId(0)
_MOST_TOKENS = 4096


@dataclass(slots=True)
class Answer:
    """The answer that a client got, with times; `ended` None: not all of it."""

    token_times_ns: list[int] = field(default_factory=list)
    ended: str | None = None
    ended_ns: int = 0


class LiveRun:
    """The same pool as the simulator's, whose decisions are logged."""

    def __init__(
        self, pool: Pool, arrivals: Sequence[SimRequest], orders: Sequence[tuple[int, MoveModel]] = ()
    ) -> None:
        self.answers: dict[RequestId, Answer] = {}
        self.log = DecisionLog()
        self._pool = pool
        self._arrivals = arrivals
        self._orders = orders
        self._names = pool.instances()
        self._conductor = Conductor()
        self._specs = {spec.model: spec for spec in pool.specs}
        self._costs = {spec.model: pool.gpu.costs(spec) for spec in pool.specs}
        self._lengths = {RequestId(at): wanted.output_tokens for at, wanted in enumerate(arrivals, 1)}
        self._site = Site(memory_bytes=pool.gpu.memory_bytes)
        self._policy = pool.recipe.policy(self._site)
        self._semaphores = TimelineSemaphores()
        self._loop = VirtualLoop(self._conductor)
        self._wire = Wire(self._conductor, self._loop, pool.gpu.handover_ns // 2)
        self._clients: list[asyncio.Task[None]] = []
        self._node: Node
        self._proxy: Proxy
        self._core: Router
        self._serving: asyncio.Task[None]
        self._images: Path

    def run(self, until_ns: int) -> None:
        """From start to stop; every answer has to be complete by then."""
        with TemporaryDirectory() as images:
            self._images = Path(images)
            self._run(until_ns)

    def _run(self, until_ns: int) -> None:
        Actor(self._conductor, self._serve_market).start()
        self._start_instances()
        for wanted in self._arrivals:
            self._conductor.agenda.at(wanted.at_ns, self._loop.happen, self._arrive, wanted)
        for at_ns, order in self._orders:
            self._conductor.agenda.at(at_ns, self._loop.happen, self._order, order)
        self._conductor.agenda.run(until_ns)
        for end in self._wire.ends:
            end.deliver([Shutdown()])
        self._loop.happen(self._serving.cancel)

    # --- the market, in its thread ------------------------------------------------------------------------------------

    def _serve_market(self, actor: Actor) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, suppress(asyncio.CancelledError):
            runner.run(self._serve(actor))

    async def _serve(self, actor: Actor) -> None:
        devices = self._devices()
        node = self._node = self._make_node(devices)
        node.pool = Processes(self._names)
        self._proxy = self._make_proxy(node)
        node.join(PROXY, self._proxy)
        sources = [Source(spec.model, path=".") for spec in self._pool.specs]
        async for _ in node.catalogue.register(sources):
            pass
        self._serving = asyncio.create_task(self._until_stopped(devices))
        self._loop.begin(actor)
        try:
            await self._serving
        finally:
            self._loop.end()

    async def _until_stopped(self, devices: Devices) -> None:
        made = self._pool.recipe.placement
        placing = []
        if made:
            policy, hardware = made(self._site), self._pool.gpu.hardware()
            placing = [Placing(self._node, self._core, policy, hardware, self._conductor).run()]
        await asyncio.gather(self._node.listen(), self._proxy.listen(), devices.watch(), *placing)

    def _make_proxy(self, node: Node) -> Proxy:
        core = self._core = Router(
            self._pool.recipe.prefill(self._site),
            self._policy,
            self._pool.gpu.hardware(),
            max_batch=self._policy.rules.max_batch,
            explains=self._pool.explains,
        )
        near, link = LocalNode(node, PROXY), self._wire.hub(PROXY)
        return Proxy(PROXY, core, near, link, self._conductor, node.history, decisions=self.log)

    def _make_node(self, devices: Devices) -> Node:
        return Node(
            self._pool.budget(),
            no_images(),
            host(self._pool.budget()),
            devices,
            self._wire.hub(None),
            self._conductor,
            History(spans=0, records=0, decisions=0, token_times=False),
            policy=self._pool.recipe.name,
            terms=Terms("", "bfloat16"),
            default_slo=Slo(),
            register=self._register,
            reuses=self._pool.reuses,
            decisions=self.log,
        )

    async def _register(self, sources: Sequence[Source], **_: Any) -> AsyncIterator[tuple[Source, ModelSpec]]:
        for source in sources:
            yield source, replace(self._specs[source.model], directory=str(self._images / source.model))

    def _devices(self) -> Devices:
        device = CountedPool(self._pool.budget().pages, PAGE_BYTES)
        count = self._pool.devices or len(self._names)
        placement = {name: at % count for at, name in enumerate(self._names)}
        idle_ns = NEVER_NS if self._pool.idle_ns is None else self._pool.idle_ns
        return Devices([device] * count, placement, self._conductor, floor_bytes=0, idle_s=idle_ns / NS_PER_S)

    def _order(self, order: MoveModel) -> None:
        self._proxy.deliver(order)

    # --- clients ------------------------------------------------------------------------------------------------------

    def _arrive(self, wanted: SimRequest) -> None:
        sampling = Sampling(max_tokens=_MOST_TOKENS, stop_token_ids=(END,))
        handle = self._proxy.submit(wanted.model, (0,) * wanted.input_tokens, sampling)
        answer = self.answers[RequestId(len(self.answers) + 1)] = Answer()
        self._clients.append(asyncio.create_task(self._read(handle, answer)))
        if wanted.leaves_ns is not None:
            self._conductor.agenda.at(wanted.leaves_ns, self._loop.happen, handle.cancel)

    async def _read(self, handle: LiveSequenceHandle, answer: Answer) -> None:
        async for delivery in handle:
            now_ns = self._conductor.now_ns()
            match delivery:
                case Delta(tokens):
                    answer.token_times_ns += [now_ns] * len(tokens)
                case Finished():
                    answer.ended, answer.ended_ns = "finished", now_ns
                case Failed(status=status):
                    answer.ended, answer.ended_ns = "cancelled" if status == 499 else "failed", now_ns

    # --- instances ----------------------------------------------------------------------------------------------------

    def _start_instances(self) -> None:
        gpu = self._pool.gpu
        bus = Bus(self._conductor.agenda, gpu.host_bytes_per_s)
        devices = [
            (Link(bus, gpu.in_bytes_per_s), Link(bus, gpu.out_bytes_per_s))
            for _ in range(self._pool.devices or len(self._names))
        ]
        for at, name in enumerate(self._names):
            self._start_instance(at, name, *devices[at % len(devices)])

    def _start_instance(self, at: int, name: InstanceId, to_device: Link, to_host: Link) -> None:
        pool, gpu, conductor = self._pool, self._pool.gpu, self._conductor
        how = {"explains": pool.explains, "reuses": pool.reuses}
        actor = Actor(conductor, lambda _: _serve(instance))
        mover = ScriptedMover(self._semaphores, to_device=to_device, to_host=to_host, actor=actor, specs=self._specs)
        ledger = Ledger(self._pool.budget(), stream_words(at), address_pages=ADDRESS_PAGES)
        core: PrefillCore | DecodeCore
        if self._names[name] is Role.PREFILL:
            core = PrefillCore(name, ledger, pool.recipe.order, gpu.hardware(), **how)
        else:
            core = DecodeCore(name, ledger, self._policy, gpu.hardware(), **how)
        engine = ScriptedEngine(conductor, actor, self._costs, self._lengths)
        parts = InstanceParts(
            instance=name,
            role=self._names[name],
            core=core,
            engine=engine,
            initialisations=lambda: 1,
            device=NoDevice(),
            images=None,
            memory_executor=mover,
            link=self._wire.end(name, actor),
            clock=conductor,
            pause=lambda until_ns: actor.wait(max(until_ns, conductor.now_ns()), listening=True),
            decisions=_Noted(self.log, engine),
        )
        instance = Instance(parts)
        actor.start()


class _Noted(DecisionLog):
    """The log, and the engine is told of each run."""

    def __init__(self, log: DecisionLog, engine: ScriptedEngine) -> None:
        self.lines = log.lines
        self._engine = engine

    def did(self, instance: InstanceId, effects: Iterable[Effect], now_ns: int) -> None:
        done = list(effects)
        super().did(instance, done, now_ns)
        for run in done:
            if isinstance(run, Run):
                self._engine.begins(run)


def _serve(instance: Instance) -> None:
    instance.serve()
    instance.close()
