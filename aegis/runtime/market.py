"""The live market: the session core and the slab leases wired to instances, clients and metrics.

One object of one event loop. Whatever an event makes the cores decide is done before the next event is looked at.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from prometheus_client import CollectorRegistry

from aegis.core.clock import Clock
from aegis.core.errors import ModelRefused, UserError
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.lifecycle import State
from aegis.core.messages import (
    AddModel,
    DropModel,
    FromInstance,
    ModelAdded,
    ModelDropped,
    ModelFailed,
    NeedSlabs,
    PeerForgotten,
    Phase,
    Ready,
    ReturnSlabs,
    Started,
    SwitchDone,
    Telemetry,
    ToInstance,
)
from aegis.core.model import ModelSpec, Slo
from aegis.core.request import Job, Sampling
from aegis.models.sources import Source, read_sources
from aegis.models.text import TextModel
from aegis.runtime.image_cache import ImageCache
from aegis.runtime.link import ProxyLink
from aegis.runtime.pool import Pool
from aegis.runtime.registering import Report, register
from aegis.telemetry.metrics import Metrics
from memory.leases import SlabLeases
from memory.ledger import Budget
from proxy.http.boundary import Delivery, Delta, Failed, Finished, PromptScores
from proxy.sessions import (
    Arrived,
    ClientLeft,
    Deliver,
    DeliverPrompt,
    Ended,
    Event,
    Heard,
    InstanceDown,
    InstanceUp,
    ModelGone,
    ModelUp,
    Replayed,
    SessionCore,
    To,
)

log = logging.getLogger(__name__)


class LiveTicket:
    """One sequence's deliveries."""

    def __init__(self, market: LiveMarket, request: RequestId) -> None:
        self._market = market
        self._request = request
        self._queue: asyncio.Queue[Delivery] = asyncio.Queue()

    async def __aiter__(self) -> AsyncIterator[Delivery]:
        while True:
            delivery = await self._queue.get()
            yield delivery
            if isinstance(delivery, Finished | Failed):
                return

    def cancel(self, *, satisfied: bool = False) -> None:
        self._market.tell(ClientLeft(self._request, satisfied))

    def put(self, delivery: Delivery) -> None:
        self._queue.put_nowait(delivery)


@dataclass(slots=True)
class LiveModel:
    """One registered model; `bound` are the instances that have its parameters bound."""

    spec: ModelSpec
    text: TextModel | None
    kv_limit_tokens: int
    created_s: int
    state: str = "loading"
    detail: str = ""
    bound: set[InstanceId] = field(default_factory=set)
    settled: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Leaving:
    """A model that was removed; `instances` are those that have not dropped it yet."""

    instances: set[InstanceId]
    gone: asyncio.Event = field(default_factory=asyncio.Event)


class LiveMarket:
    """Implements `proxy.http.boundary.Market`."""

    def __init__(
        self,
        core: SessionCore,
        budget: Budget,
        images: ImageCache,
        link: ProxyLink,
        clock: Clock,
        *,
        dtype: str,
        cache_dir: Path,
        default_slo: Slo,
    ) -> None:
        self._core = core
        self._budget = budget
        self._images = images
        self._link = link
        self._clock = clock
        self._dtype = dtype
        self._cache_dir = cache_dir
        self._default_slo = default_slo
        self._leases = SlabLeases(budget.host_slabs)
        self._metrics = Metrics()
        self._models: dict[ModelId, LiveModel] = {}
        self._leaving: dict[ModelId, _Leaving] = {}
        self._admitting = asyncio.Lock()
        self._tickets: dict[RequestId, LiveTicket] = {}
        self._outbox: defaultdict[InstanceId, list[ToInstance]] = defaultdict(list)
        self._next_request = 0
        self._up: set[InstanceId] = set()
        self.draining = False
        self.pool: Pool | None = None

    # --- what the HTTP layer asks -------------------------------------------------------------------------------------

    @property
    def registry(self) -> CollectorRegistry:
        return self._metrics.registry

    def models(self) -> Mapping[str, LiveModel]:
        return cast(Mapping[str, LiveModel], self._models)

    def submit(self, model: ModelId, prompt: Sequence[int], sampling: Sampling) -> LiveTicket:
        if self.draining:
            raise UserError("the server is shutting down; try another one", status=503, kind="server_error")
        if self._models[model].state == "failed":
            raise UserError(f"model '{model}' cannot be served: {self._models[model].detail}", status=503)
        self._next_request += 1
        request, now_ns = RequestId(self._next_request), self._clock.now_ns()
        ticket = self._tickets[request] = LiveTicket(self, request)
        slo = self._models[model].spec.slo
        self._metrics.arrived(request, model, slo, now_ns, prompt_tokens=len(prompt), max_tokens=sampling.max_tokens)
        self.tell(Arrived(Job(request, 1, model, tuple(prompt), sampling, now_ns)))
        return ticket

    def healthy(self) -> tuple[bool, str]:
        dead = self._pool.dead()
        return not dead, f"does not come up any more: {', '.join(dead)}" if dead else "ok"

    def ready(self) -> tuple[bool, str]:
        if self.draining:
            return False, "draining"
        missing = self._pool.missing()
        missing += [i for m in self._models.values() if m.state != "failed" for i in self._up - m.bound]
        return not missing, f"waiting for {', '.join(sorted(set(missing)))}" if missing else "ok"

    async def add_model(self, source: str, name: str | None) -> LiveModel:
        sources = read_sources([source], default_slo=self._default_slo)
        if len(sources) != 1:
            raise UserError(f"{source} holds {len(sources)} models; add them one at a time", param="source")
        return await self._add_one(sources[0], name)

    async def _add_one(self, source: Source, name: str | None) -> LiveModel:
        model = ModelId(name or source.model)
        if model in self._models:
            raise UserError(f"there is already a model named '{model}'", status=409, param="name")
        renamed = Source(model, source.path, source.hub, source.slo, source.dtype)
        async for _, outcome in self.register([renamed]):
            if isinstance(outcome, ModelRefused):
                raise outcome
        return self._models[model]

    async def remove_model(self, name: str) -> None:
        model = ModelId(name)
        if model not in self._models:
            raise UserError(f"there is no model named '{name}'", status=404, param="model")
        self._forget(model)

    @property
    def busy(self) -> bool:
        return bool(self._tickets)

    def abandon(self) -> None:
        """Fails every request that has not ended: the server is about to."""
        for request in list(self._tickets):
            self.tell(ClientLeft(request))

    # --- registering ------------------------------------------------------------------------------------------------

    async def register(
        self, sources: Sequence[Source], report: Report = lambda _model, _text: None
    ) -> AsyncIterator[tuple[Source, LiveModel | ModelRefused]]:
        """Registers and binds; yields what became of each. Requests to other models go on meanwhile."""
        limit_bytes = self._budget.pages * self._budget.page_bytes
        registered = register(
            sources, dtype=self._dtype, cache_dir=self._cache_dir, limit_bytes=limit_bytes, report=report
        )
        async for source, outcome in registered:
            yield source, outcome if isinstance(outcome, ModelRefused) else await self._admit(source, outcome)

    async def _admit(self, source: Source, spec: ModelSpec) -> LiveModel | ModelRefused:
        async with self._admitting:
            while spec.model in self._leaving:  # an instance may be in a step of a model that bore this name
                await self._leaving[spec.model].gone.wait()
            refusal = self._misfit(spec)
            if refusal or spec.model in self._models:
                return ModelRefused(refusal or f"there is already a model named '{spec.model}'")
            spec, text = await asyncio.to_thread(self._prepare, spec)
            limit = self._budget.sequence_tokens(spec.manifest.image_bytes, spec.manifest.kv)
            model = self._models[spec.model] = LiveModel(spec, text, limit, int(time.time()))
        self.tell(ModelUp(spec, limit))
        self._broadcast(self._up, AddModel(spec))
        if not self._up:
            self._settle(model)
        await model.settled.wait()
        if model.state == "failed":
            if self._models.get(spec.model) is model:
                self._forget(spec.model)
            return ModelRefused(f"{source.root}: {model.detail}")
        return model

    def _prepare(self, spec: ModelSpec) -> tuple[ModelSpec, TextModel | None]:
        return self._images.hold(spec), TextModel.load(Path(spec.directory))

    def _misfit(self, spec: ModelSpec) -> str:
        manifest, budget = spec.manifest, self._budget
        total, mib = budget.pages * budget.page_bytes, 1 << 20
        if manifest.image_bytes > total:
            return (
                f"{spec.root}: its weights are {manifest.image_bytes / mib:.0f} MiB, an instance holds "
                f"{total / mib:.0f} MiB; raise --device-memory"
            )
        if manifest.kv.block_bytes > budget.slab_bytes:
            return (
                f"{spec.root}: a KV block of it is {manifest.kv.block_bytes / mib:.1f} MiB, a slab "
                f"{budget.slab_bytes / mib:.1f} MiB; raise --slab"
            )
        if budget.sequence_tokens(manifest.image_bytes, manifest.kv) <= 0:
            return (
                f"{spec.root}: beside its weights of {manifest.image_bytes / mib:.0f} MiB an instance of "
                f"{total / mib:.0f} MiB has no room for a slab of KV; raise --device-memory or --host-memory"
            )
        return ""

    def _forget(self, model: ModelId) -> None:
        self.tell(ModelGone(model))
        left = self._models.pop(model)
        if left.state == "loading":
            left.state, left.detail = "failed", "it was removed"
            self._settle(left)
        self._broadcast(self._up, DropModel(model))
        self._leaving[model] = _Leaving(set(self._up))
        self._let_go(model)

    def _dropped(self, model: ModelId, instance: InstanceId) -> None:
        """The instance has nothing of the model any more."""
        if model in self._leaving:
            self._leaving[model].instances.discard(instance)
            self._let_go(model)

    def _let_go(self, model: ModelId) -> None:
        """Once all instances have dropped it: until then they may have the image's path before them."""
        if not self._leaving[model].instances:
            self._leaving.pop(model).gone.set()
            self._images.drop(model)

    def _settle(self, model: LiveModel) -> None:
        if model.state == "loading" and model.bound >= self._up:
            model.state = "ready"
        if model.state != "loading":
            model.settled.set()

    # --- what instances say -------------------------------------------------------------------------------------------

    async def listen(self) -> None:
        """Runs until it is cancelled."""
        while True:
            identity, messages = await self._link.receive()
            instance = self._pool.sender(identity)
            if instance is None:
                continue
            for message in messages:
                self._hear(instance, message)
            self._flush()

    def lost(self, instance: InstanceId) -> None:
        """Its process is gone."""
        if instance in self._up:
            self._up.discard(instance)
            self._outbox.pop(instance, None)
            for other, message in self._leases.lost(instance):
                self._outbox[other].append(message)
            self._perform(InstanceDown(instance))
        self._metrics.restarted(instance)
        for model in self._models.values():
            model.bound.discard(instance)
            self._settle(model)
        for leaving in list(self._leaving):
            self._dropped(leaving, instance)
        self._flush()

    def _hear(self, instance: InstanceId, message: FromInstance) -> None:
        match message:
            case Ready():
                self._came_up(instance)
            case ModelAdded(model) if model in self._models:
                self._models[model].bound.add(instance)
                self._settle(self._models[model])
            case ModelFailed(model, reason) if model in self._models:
                self._models[model].state, self._models[model].detail = "failed", reason
                self._settle(self._models[model])
            case ModelAdded() | ModelFailed():
                pass  # of a model that was removed meanwhile
            case ModelDropped(model):
                self._dropped(model, instance)
            case NeedSlabs(count):
                self._lease(self._leases.ask(instance, count))
            case ReturnSlabs(slabs):
                self._lease(self._leases.give_back(instance, slabs))
            case PeerForgotten(peer):
                self._lease(self._leases.forgotten(instance, peer))
            case Telemetry():
                self._metrics.telemetry(instance, message)
            case _:
                self._observe(message)
                self._perform(Heard(instance, message))

    def _observe(self, message: FromInstance) -> None:
        match message:
            case SwitchDone():
                self._metrics.switch(message)
            case Started(request, _) if request in self._tickets:
                self._metrics.started(request, self._clock.now_ns())
            case Phase(requests, running):
                self._metrics.phase(requests, running=running)

    def _came_up(self, instance: InstanceId) -> None:
        self._pool.became_ready(instance)
        self._leases.join(instance)
        self._up.add(instance)
        self._outbox[instance] += [AddModel(model.spec) for model in self._models.values()]
        self._metrics.up(instance, True)
        self._perform(InstanceUp(instance, self._pool.is_prefill(instance)))

    # --- doing --------------------------------------------------------------------------------------------------------

    def tell(self, event: Event) -> None:
        """An event from outside the instances."""
        self._perform(event)
        self._flush()

    def _perform(self, event: Event) -> None:
        now_ns = self._clock.now_ns()
        for effect in self._core.on(event, now_ns):
            match effect:
                case To(instance, message):
                    self._outbox[instance].append(message)
                case Deliver(request, _, tokens):
                    self._metrics.token(request, now_ns, len(tokens))
                    self._tickets[request].put(Delta(tokens))
                case DeliverPrompt(request, tokens):
                    self._tickets[request].put(PromptScores(tokens))
                case Replayed(request):
                    self._metrics.replayed(request)
                case Ended():
                    self._end(effect, now_ns)

    def _end(self, ended: Ended, now_ns: int) -> None:
        ticket = self._tickets.pop(ended.request)
        if ended.state is State.FINISHED and ended.reason is not None:
            self._metrics.finished(ended.request, ended.reason, now_ns)
            ticket.put(Finished(ended.reason))
        elif ended.state is State.FAILED:
            self._metrics.failed(ended.request)
            ticket.put(Failed(ended.message))
        else:
            self._metrics.cancelled(ended.request)
            ticket.put(Failed("the server is shutting down", 503) if self.draining else Failed("cancelled", 499))

    def _lease(self, grants: Iterable[tuple[InstanceId, ToInstance]]) -> None:
        for instance, message in grants:
            self._outbox[instance].append(message)

    def _broadcast(self, instances: Iterable[InstanceId], message: ToInstance) -> None:
        for instance in instances:
            self._outbox[instance].append(message)
        self._flush()

    def _flush(self) -> None:
        for instance, messages in self._outbox.items():
            if messages:
                self._link.send(self._pool.identity(instance), messages)
        self._outbox.clear()

    @property
    def _pool(self) -> Pool:
        assert self.pool is not None
        return self.pool


def new_session_core(max_group_size: int, q_max_ns: int) -> SessionCore:
    """With the policies that ship."""
    from decode.policy import WeightedRoundRobin
    from prefill.policy import GroupedFcfs

    return SessionCore(GroupedFcfs(max_group_size), WeightedRoundRobin(q_max_ns), Hardware())
