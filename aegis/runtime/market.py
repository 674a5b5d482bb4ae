"""The live market: the session core and the slab leases wired to instances, clients and metrics.

One object of one event loop. Whatever an event makes the cores decide is done before the next event is looked at.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry

from aegis.core.clock import Clock
from aegis.core.decision import Decision
from aegis.core.errors import UserError
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.lifecycle import State
from aegis.core.messages import (
    AddModel,
    FromInstance,
    GaveBack,
    ImageEvicted,
    ImageUnreadable,
    ModelAdded,
    ModelDropped,
    ModelFailed,
    NeedPages,
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
from aegis.core.model import Slo
from aegis.core.request import Job, Sampling
from aegis.runtime.catalogue import Catalogue, LiveModel
from aegis.runtime.devices import Devices
from aegis.runtime.image_cache import ImageCache
from aegis.runtime.link import ProxyLink, Said
from aegis.runtime.pool import Pool
from aegis.runtime.registering import Registering, register
from aegis.runtime.store.loads import Load
from aegis.runtime.tickets import LiveTicket
from aegis.telemetry.decisions import DecisionLog, Decisions
from aegis.telemetry.device_memory import DeviceMemoryMetrics
from aegis.telemetry.history import History
from aegis.telemetry.logs import log
from aegis.telemetry.memory_report import (
    MemoryReport,
    report_device,
    report_host_kv,
    report_model_cache,
)
from aegis.telemetry.metrics import Metrics
from aegis.telemetry.model_cache import ModelCacheMetrics
from aegis.telemetry.node import NodeReport
from aegis.telemetry.spans import Spans
from memory.budget import Budget
from memory.leases import SlabLeases
from proxy.events import (
    Arrived,
    ClientLeft,
    Deliver,
    DeliverPrompt,
    Ended,
    Event,
    Heard,
    InstanceDown,
    InstanceUp,
    Replayed,
    To,
)
from proxy.http.boundary import Delta, Failed, Finished, PromptScores
from proxy.sessions import SessionCore

_logger = logging.getLogger(__name__)


class LiveMarket:
    """Implements `proxy.http.boundary.Market`."""

    def __init__(
        self,
        core: SessionCore,
        budget: Budget,
        images: ImageCache,
        devices: Devices,
        link: ProxyLink,
        clock: Clock,
        history: History,
        *,
        policy: str,
        dtype: str,
        cache_dir: Path,
        default_slo: Slo,
        register: Registering = register,
        check_laws: bool = False,
        decisions: DecisionLog | None = None,
    ) -> None:
        self._core = core
        self._policy = policy
        self._link = link
        self._clock = clock
        self._check_laws = check_laws
        self._decisions = decisions
        self._budget = budget
        self._leases = SlabLeases(budget.host_slabs)
        self._reports: dict[InstanceId, Telemetry] = {}  # the last of each instance that is up
        self._metrics = Metrics()
        self._history = history
        self._tickets: dict[RequestId, LiveTicket] = {}
        self._outbox: defaultdict[InstanceId, list[ToInstance]] = defaultdict(list)
        self._next_request = 0
        self._images = images
        images.wire = self
        self.devices = devices
        devices.wire = self
        self._metrics.registry.register(DeviceMemoryMetrics(devices.arbiters(), devices.page_bytes))
        self._metrics.registry.register(ModelCacheMetrics(images.counters, images.accounts))
        self.catalogue = Catalogue(
            self, budget, images, register, dtype=dtype, cache_dir=cache_dir, default_slo=default_slo
        )
        self.up: set[InstanceId] = set()
        self.draining = False
        self.pool: Pool | None = None

    # --- what the HTTP layer asks -------------------------------------------------------------------------------------

    @property
    def registry(self) -> CollectorRegistry:
        return self._metrics.registry

    def models(self) -> Mapping[str, LiveModel]:
        return self.catalogue.models()

    def submit(
        self,
        model: ModelId,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        priority: int = 0,
        sent: tuple[int, ...] = (),
    ) -> LiveTicket:
        served = self.catalogue.models().get(model)
        if served is None:
            raise UserError(f"model '{model}' was removed", status=404, param="model", code="model_not_found")
        if served.state == "failed":
            raise UserError(f"model '{model}' cannot be served: {served.detail}", status=503)
        if self._unavailable():
            raise UserError(self._unavailable(), status=503, kind="server_error")
        self._next_request += 1
        request, now_ns = RequestId(self._next_request), self._clock.now_ns()
        ticket = self._tickets[request] = LiveTicket(request, self.tell)
        self._images.use(model, now_ns)
        slo = served.spec.slo
        for watcher in (self._metrics, self._history.requests):
            watcher.arrived(request, model, slo, now_ns, prompt_tokens=len(prompt), max_tokens=sampling.max_tokens)
        self.tell(Arrived(Job(request, 1, model, tuple(prompt), sampling, now_ns, sent, priority)))
        return ticket

    def healthy(self) -> tuple[bool, str]:
        dead = self._pool.dead()
        return not dead, f"does not come up any more: {', '.join(dead)}" if dead else "ok"

    def ready(self) -> tuple[bool, str]:
        if self.draining:
            return False, "draining"
        missing = {*self._pool.missing(), *self.catalogue.unbound()}
        return not missing, f"waiting for {', '.join(sorted(missing))}" if missing else "ok"

    async def add_model(self, source: str, name: str | None) -> LiveModel:
        return await self.catalogue.add(source, name)

    async def remove_model(self, name: str) -> None:
        self.catalogue.remove(name)

    def history(self) -> History:
        return self._history

    def node(self) -> NodeReport:
        return NodeReport(
            self._policy,
            len(self.devices.arbiters()),
            self.devices.page_count * self.devices.page_bytes,
            self._budget.slab_bytes,
            self._budget.host_slabs * self._budget.slab_bytes,
            self._pool.roles(),
            tuple(model.spec.without_tensors() for model in self.catalogue.models().values()),
        )

    def memory_report(self) -> MemoryReport:
        page_bytes = self.devices.page_bytes
        image_bytes = {model.spec.model: model.spec.manifest.image_bytes for model in self.catalogue.models().values()}
        return MemoryReport(
            tuple(
                report_device(ordinal, arbiter, self._reports, image_bytes, page_bytes=page_bytes)
                for ordinal, arbiter in enumerate(self.devices.arbiters())
            ),
            report_host_kv(self._leases, self._reports.values(), slab_bytes=self._budget.slab_bytes),
            report_model_cache(self._images.images(), self._images.accounts(), self._images.counters),
        )

    def loads(self) -> dict[InstanceId, Load]:
        """Of the instances that are up, as they said last."""
        roles = self._pool.roles()
        return {
            instance: Load(roles[instance], told.queued, told.running, told.running_model, told.resident, told.loading)
            for instance, told in self._reports.items()
        }

    async def limit_memory(self, instance: str, nbytes: int, *, timeout_s: float) -> int:
        least_bytes = self.catalogue.least_pages() * self.devices.page_bytes
        return await self.devices.limit(instance, nbytes, least_bytes=least_bytes, timeout_s=timeout_s)

    async def trim_memory(self, instance: str, *, timeout_s: float) -> int:
        return await self.devices.trim(instance, timeout_s=timeout_s)

    @property
    def busy(self) -> bool:
        return bool(self._tickets)

    def abandon(self) -> None:
        """Fails every request that has not ended: the server is about to, or nobody is left to serve it."""
        for request in list(self._tickets):
            self.tell(ClientLeft(request))

    def _unavailable(self) -> str:
        """Why no request can be served, if none can."""
        if self.draining:
            return "the server is shutting down; try another one"
        return "its instances do not come up any more" if self._pool.hopeless() else ""

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
        if instance in self.up:
            self.up.discard(instance)
            self._outbox.pop(instance, None)
            self._reports.pop(instance, None)
            self._lease(self._leases.lost(instance))
            self.devices.lost(instance)
            self._images.lost(instance)
            self._perform(InstanceDown(instance))
        self._metrics.restarted(instance)
        self.catalogue.lost(instance)
        self._flush()

    def given_up(self, instance: InstanceId) -> None:
        """It is not started again."""
        log(_logger, logging.ERROR, "instance given up", {"instance": instance})
        self.tell(InstanceDown(instance, for_good=True))
        if self._pool.hopeless():
            self.abandon()

    def _hear(self, instance: InstanceId, message: Said) -> None:
        match message:
            case Spans(spans):
                self._history.spans.add(spans)
            case Decisions(decisions):
                self._history.decisions.add(decisions)
            case Ready():
                self._came_up(instance)
            case ModelAdded(model):
                self.catalogue.added(model, instance)
            case ModelFailed(model, reason):
                self.catalogue.failed(model, reason)
            case ModelDropped(model):
                self.catalogue.dropped(model, instance)
            case NeedSlabs(count):
                self._lease(self._leases.ask(instance, count))
            case ReturnSlabs(slabs):
                self._lease(self._leases.give_back(instance, slabs))
            case NeedPages():
                self.devices.asked(instance, message)
            case GaveBack():
                self.devices.gave_back(instance, message)
            case ImageEvicted(model):
                self._images.evicted(model, instance)
            case ImageUnreadable(model, reason):
                self.catalogue.damaged(model, reason)
            case PeerForgotten(peer):
                self._lease(self._leases.forgotten(instance, peer))
            case Telemetry():
                self._reports[instance] = message
                self.devices.seen(instance, message)
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
        self.devices.join(instance)
        self.up.add(instance)
        self._outbox[instance] += [AddModel(spec) for spec in self.catalogue.specs()]
        self._images.join(instance)
        self._metrics.up(instance, True)
        self._perform(InstanceUp(instance, self._pool.role(instance)))

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
                    self._put(instance, message)
                case Deliver(request, _, tokens):
                    self._metrics.token(request, now_ns, len(tokens))
                    self._history.requests.tokens(request, now_ns, len(tokens))
                    self._tickets[request].put(Delta(tokens))
                case DeliverPrompt(request, tokens):
                    self._tickets[request].put(PromptScores(tokens))
                case Replayed(request):
                    self._metrics.replayed(request)
                case Ended():
                    self._end(effect, now_ns)
                case Decision():
                    self._decided(effect)

    def _decided(self, decision: Decision) -> None:
        self._history.decisions.add((decision,))
        if self._decisions:
            self._decisions.explained(decision)

    def _end(self, ended: Ended, now_ns: int) -> None:
        ticket = self._tickets.pop(ended.request)
        if ended.state is State.FINISHED and ended.reason is not None:
            self._metrics.finished(ended.request, ended.reason, now_ns)
            self._history.requests.end(ended.request, "finished")
            ticket.put(Finished(ended.reason))
        elif ended.state is State.FAILED:
            self._metrics.failed(ended.request)
            self._history.requests.end(ended.request, "failed")
            ticket.put(Failed(ended.message))
        else:
            self._metrics.cancelled(ended.request)
            self._history.requests.end(ended.request, "cancelled")
            why = self._unavailable()
            ticket.put(Failed(why, 503) if why else Failed("cancelled", 499))

    def broadcast(self, message: ToInstance) -> None:
        for instance in self.up:
            self._put(instance, message)
        self._flush()

    def post(self, instance: InstanceId, message: ToInstance) -> None:
        self._put(instance, message)
        self._flush()

    def image_forgotten(self, model: ModelId) -> None:
        self.catalogue.uncached(model)

    def image_damaged(self, model: ModelId, reason: str) -> None:
        self.catalogue.damaged(model, reason)

    def _lease(self, grants: Iterable[tuple[InstanceId, ToInstance]]) -> None:
        for instance, message in grants:
            self._put(instance, message)
        if self._check_laws:
            self._leases.check()

    def _put(self, instance: InstanceId, message: ToInstance) -> None:
        self._outbox[instance].append(message)
        if self._decisions:
            self._decisions.told(instance, message, self._clock.now_ns())

    def _flush(self) -> None:
        for instance, messages in self._outbox.items():
            if messages:
                self._link.send(self._pool.identity(instance), messages)
        self._outbox.clear()

    @property
    def _pool(self) -> Pool:
        assert self.pool is not None
        return self.pool
