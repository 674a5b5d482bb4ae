"""The node: the processes of a machine's instances, its devices, leases, images and models.

It exchanges messages with its instances about memory, models and their life, and tells its proxies which instances live
and which models there are. Messages about a request pass it by. It is one object of one event loop: its cores'
decisions on an event are performed before the next event is looked at.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import aegis
from aegis.control.bus import Bus
from aegis.core.api_keys import Keyring
from aegis.core.clock import Clock
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, ModelId, ProxyId
from aegis.core.messages import (
    AddModel,
    DropProxy,
    FetchKv,
    GaveBack,
    ImageEvicted,
    ImageUnreadable,
    MeetProxy,
    ModelAdded,
    ModelDropped,
    ModelFailed,
    ModelUnloaded,
    NeedPages,
    Pong,
    ProxyDropped,
    Ready,
    ReleaseProxy,
    SwitchDone,
    Telemetry,
    ToInstance,
)
from aegis.core.model import ModelSpec, Slo
from aegis.core.request import Job, KeptPrefix
from aegis.models.prefix_reuse import may_reuse
from aegis.models.terms import Terms
from aegis.node.devices import Devices
from aegis.node.image_caches import ImageCaches
from aegis.node.instance_supervisor import InstanceSupervisor
from aegis.node.kv_fetches import Fetches, Fetching
from aegis.node.model_catalogue import Catalogue
from aegis.node.model_moves import ModelMoves
from aegis.node.proxy_links import ProxyLinks
from aegis.node.registration import Register
from aegis.telemetry.decisions import DecisionLog, Decisions
from aegis.telemetry.history import History
from aegis.telemetry.logs import log
from aegis.telemetry.metrics.memory import DeviceMemoryMetrics, ModelCacheMetrics, PrefixMetrics
from aegis.telemetry.metrics.node import NodeMetrics
from aegis.telemetry.metrics.server_state import ServerState, ServerStateMetrics
from aegis.telemetry.spans import Spans
from aegis.transport.links import Hub, NodeMessage
from aegis.transport.node_messages import (
    Drain,
    FromProxy,
    InstanceGivenUp,
    InstanceLost,
    KeysSet,
    ModelUsed,
    ModelWanted,
    Noted,
    PermitAnswer,
    PermitOver,
    PermitUsed,
    PermitWanted,
    ProxyEnd,
    ProxyReport,
    Registering,
    Unserved,
)
from aegis.transport.outbox import Outbox
from memory.awaited_answers import AwaitedAnswers
from memory.budget import Budget
from memory.host_kv import ForHost
from memory.machines_kv import MachinesKv
from memory.peers.links import ForLinks, PeerLinks
from proxy.routing.events import ModelAway, ModelMoved, ModelRemoved, ModelUp, SloSet
from proxy.routing.permits import Permits

_logger = logging.getLogger(__name__)
_HARDWARE = Hardware()


class Node:
    """`images` and `host` are those of all machines. `history` is what its instances did and what became of all
    proxies' requests. Without a `bus` an instance is lost when its process ends, and not before."""

    def __init__(
        self,
        budget: Budget,
        images: ImageCaches,
        host: MachinesKv,
        devices: Devices,
        link: Hub[NodeMessage],
        clock: Clock,
        history: History,
        *,
        policy: str,
        terms: Terms,
        default_slo: Slo,
        hardware: Hardware = _HARDWARE,
        register: Register,
        bus: Bus | None = None,
        reuses: bool = False,
        fetching: Fetching | None = None,
        check_laws: bool = False,
        decisions: DecisionLog | None = None,
        peer_links: PeerLinks | None = None,
        build_before: Callable[[ModelSpec], None] = lambda spec: None,
    ) -> None:
        """`build_before` is told of each model, so that instances that are started later have less to do."""
        self.policy = policy
        self.history = history
        self.host = host
        host.spec_of = self._spec_of
        self.reports: dict[InstanceId, Telemetry] = {}  # the last of each instance that is up
        self.metrics = NodeMetrics()
        self.bus = bus
        self.proxies = ProxyLinks()
        self._sharing = False
        self.moves = ModelMoves(self.proxies, self.metrics.moves)
        self._keys = Keyring()
        self._permits = Permits()
        self.images = images
        self.devices = devices
        self._peer_links = peer_links  # of the only machine
        images.wire = devices.wire = self
        self.metrics.registry.register(DeviceMemoryMetrics(devices.arbiters, devices.page_bytes))
        self.metrics.registry.register(ModelCacheMetrics(images.counters, images.accounts))
        self.metrics.registry.register(PrefixMetrics(self.host))
        build = {"version": aegis.__version__, "policy": policy, "engine": terms.engine}
        self.metrics.registry.register(ServerStateMetrics(self.state, build))
        self.catalogue = Catalogue(self, budget, images, register, terms, default_slo=default_slo, hardware=hardware)
        self.up: set[InstanceId] = set()
        self.draining = False
        self._announced_unserved = False  # as the proxies were told
        self._pool: InstanceSupervisor | None = None
        self._link = link
        self.clock = clock
        self._reuses = reuses
        self._build_before = build_before
        self._check_laws = check_laws
        self._lost_proxies = AwaitedAnswers[ProxyId]()
        self._fetches = Fetches(fetching, self.post) if fetching else None
        self._outbox = Outbox(link, lambda instance: self.pool.identity(instance), clock, decisions)

    @property
    def pool(self) -> InstanceSupervisor:
        assert self._pool is not None
        return self._pool

    @pool.setter
    def pool(self, pool: InstanceSupervisor) -> None:
        self._pool = pool

    @property
    def budget(self) -> Budget:
        """What an instance may hold, with the number of instances that share it now."""
        return self.catalogue.budget

    def state(self) -> ServerState:
        """The state of the server, for metrics. May be called from any thread."""
        states, roles, slab_bytes = self.pool.states(), self.pool.roles(), self.budget.slab_bytes
        slabs = {"leased": self.host.leased, "free": self.host.free, "kept": self.host.kept}
        slabs["orphaned"] = self.host.capacity - sum(slabs.values())
        return ServerState(
            {instance: (roles[instance], state) for instance, state in states.items() if instance in roles},
            tuple(model.state for model in list(self.catalogue.models().values())),
            len(self.proxies.addresses()),
            {state: count * slab_bytes for state, count in slabs.items()},
            self.bus is not None and self.bus.is_up,
        )

    # --- proxies ------------------------------------------------------------------------------------------------------

    def join(self, proxy: ProxyId, end: ProxyEnd) -> None:
        """The proxy listens: it is told all there is, and instances greet it."""
        self.proxies.join(proxy, end)
        end.deliver(KeysSet(self._keys))
        if self._announced_unserved:
            end.deliver(self._unserved_message())
        for event in (*self.catalogue.ready(), *self.moves.places()):
            end.deliver(event)
        if self.draining:
            end.deliver(Drain(0.0))  # it has no requests that could finish
        self.broadcast(MeetProxy(proxy, end.address))

    def leave(self, proxy: ProxyId) -> None:
        """The proxy is lost, and with it all its requests."""
        self.proxies.leave(proxy)
        self.moves.left(proxy)
        self._permits.lost(proxy, self.clock.now_ns())
        self._lost_proxies.begin(proxy, self.up)
        self.broadcast(DropProxy(proxy))

    @property
    def keys(self) -> Keyring:
        """The keys that clients have to send."""
        return self._keys

    @keys.setter
    def keys(self, keys: Keyring) -> None:
        self._keys = keys
        self.proxies.broadcast(KeysSet(keys))

    def drain(self, within_s: float) -> None:
        """No proxy takes any more requests; those there are may finish within that time."""
        self.draining = True
        self.proxies.broadcast(Drain(within_s))

    def on_proxy_message(self, proxy: ProxyId, message: FromProxy) -> None:
        """Takes a message that a proxy sends about itself."""
        match message:
            case Noted():
                self.proxies.noted(proxy, message)
            case ModelMoved():
                self.moves.answered(proxy, message)
            case ModelUsed(model):
                self.catalogue.used(model, self.clock.now_ns())
                self._outbox.flush()
            case ModelWanted(model):
                self.catalogue.want(model)
            case PermitWanted(number, scopes):
                refusal = self._permits.ask(proxy, number, scopes, self.clock.now_ns())
                refused = (refusal.what, refusal.wait_ns, refusal.kind) if refusal else ()
                self.proxies.answer(proxy, PermitAnswer(number, *refused))
            case PermitUsed(number, tokens):
                self._permits.use(proxy, number, tokens, self.clock.now_ns())
            case PermitOver(number, tokens):
                self._permits.close(proxy, number, tokens, self.clock.now_ns())
            case ProxyReport(loads, records, decisions):
                self.history.records.add(records)
                self.history.decisions.add(decisions)
                self.proxies.loads(proxy, loads)
                self._share_soon()

    def _share_soon(self) -> None:
        """With all that is reported meanwhile: many proxies report often."""
        if not self._sharing:
            self._sharing = True
            asyncio.get_running_loop().call_soon(self._share)

    def _share(self) -> None:
        self._sharing = False
        self.proxies.share()

    def prefix_of(self, instance: InstanceId, job: Job) -> KeptPrefix | None:
        """The kept KV of the job's prompt on the instance's machine."""
        return self.host.prefix_of(instance, job) if self._reuses else None

    # --- what instances say -------------------------------------------------------------------------------------------

    async def listen(self) -> None:
        """Runs until it is cancelled."""
        while True:
            identity, messages = await self._link.receive()
            instance = self.pool.sender(identity)
            if instance is None:
                continue
            for message in messages:
                self._on_instance_message(instance, message)
            self._outbox.flush()
            if instance in self.pool.coming() and self.serves(instance):
                self.pool.arrived(instance)
                self._announce_unserved()

    async def lost(self, instance: InstanceId, incarnation: int) -> None:
        """The instance's process is gone. The others learn of it only when every proxy knows: otherwise their messages,
        and their use of KV that is not coming, would be taken for good."""
        requested = self.pool.drained(instance)
        if instance in self.up:
            self.up.discard(instance)
            self._outbox.forget(instance)
            self._leave_links(instance)
            self.reports.pop(instance, None)
            await self.proxies.lost(InstanceLost(instance, incarnation, requested=requested))
            if self._fetches:
                await self._fetches.lost(instance)
            self._answer(self.host.lost(instance, self.pool.words(instance)))
            self.devices.lost(instance)
            self.images.lost(instance)
            self._release(self._lost_proxies.lost(instance))
        if self.bus:
            self.bus.ended(instance)
        self.metrics.ended(instance, requested=requested)
        self.catalogue.lost(instance)
        self._outbox.flush()

    def _leave_links(self, instance: InstanceId) -> None:
        """Before its pages are anybody else's: who takes pieces from there finds that it is lost."""
        staged = self._peer_links.lost(instance) if self._peer_links else None
        if staged is not None:
            self.pool.poison(instance, (staged,))

    def serves(self, instance: InstanceId) -> bool:
        """Whether it is up and has all models."""
        return instance in self.up and instance not in self.catalogue.unbound()

    def removed(self, instance: InstanceId) -> None:
        """The instance has left for good."""
        self.proxies.broadcast(InstanceGivenUp(instance))
        self._announce_unserved()
        self.metrics.removed(instance)
        if self.bus:
            self.bus.removed(instance)

    def given_up(self, instance: InstanceId) -> None:
        """The instance is not started again."""
        log(_logger, logging.ERROR, "instance given up", {"instance": instance})
        self.proxies.broadcast(InstanceGivenUp(instance))
        self._announce_unserved()

    def _announce_unserved(self) -> None:
        """Whether every role has an instance that might come up."""
        if self.pool.hopeless() is not self._announced_unserved:
            self._announced_unserved = not self._announced_unserved
            self.proxies.broadcast(self._unserved_message())

    def _unserved_message(self) -> Unserved:
        return Unserved("its instances do not come up any more" if self._announced_unserved else "")

    def _on_instance_message(self, instance: InstanceId, message: NodeMessage) -> None:
        match message:
            case Spans(spans):
                self.history.spans.add(spans)
                self.metrics.work.did(spans)
            case Decisions(decisions):
                self.history.decisions.add(decisions)
                self.metrics.work.decided(decisions)
            case Ready():
                self._came_up(instance)
            case Pong():
                if self.bus:
                    self.bus.answered(instance)
            case ModelAdded(model):
                self.catalogue.added(model, instance)
            case ModelFailed(model, reason):
                self.catalogue.refused(model, instance, reason)
            case ModelDropped(model):
                self.catalogue.dropped(model, instance)
            case ModelUnloaded(model):
                self.catalogue.unloaded(model, instance)
            case message if isinstance(message, ForHost):
                self._answer(self.host.on_message(instance, message))
            case FetchKv():
                assert self._fetches, "there is one machine"
                self._fetches.begin(instance, self.pool.machine(instance), message)
            case message if isinstance(message, ForLinks):
                if self._peer_links:
                    for receiver, asked in self._peer_links.on_message(instance, message):
                        self._outbox.put(receiver, asked)
            case NeedPages():
                self.devices.pages_requested(instance, message)
            case GaveBack():
                self.devices.gave_back(instance, message)
            case ImageEvicted(model):
                self.images.evicted(model, instance)
            case ImageUnreadable(model, reason):
                self.catalogue.damaged(model, reason, wanted=True)
            case ProxyDropped(proxy):
                if self._lost_proxies.answered(proxy, instance):
                    self._release([proxy])
            case SwitchDone():
                self.metrics.switch(message)
            case Telemetry():
                self.reports[instance] = message
                self.devices.seen(instance, message)
                self.metrics.telemetry(instance, message)
            case _:
                raise AssertionError(f"not for a node: {message}")

    def _came_up(self, instance: InstanceId) -> None:
        self.pool.became_ready(instance)
        machine = self.pool.machine(instance)
        self.host.join(instance, machine)
        self.devices.join(instance)
        if self._peer_links:
            self._peer_links.join(instance, *self.devices.addresses(instance))
        self.up.add(instance)
        self._outbox.put(instance, *(self._add_model(instance, spec) for spec in self.catalogue.specs()))
        self._outbox.put(instance, *(MeetProxy(proxy, at) for proxy, at in self.proxies.addresses().items()))
        self.images.join(instance, machine)
        self.metrics.up(instance, True)

    # --- doing --------------------------------------------------------------------------------------------------------

    def notify_proxies(self, event: ModelUp | ModelAway | ModelRemoved | SloSet | Registering) -> None:
        if isinstance(event, ModelRemoved):
            self.moves.removed(event.model)
        self.proxies.broadcast(event)

    def broadcast(self, message: ToInstance) -> None:
        if isinstance(message, AddModel):
            self._build_before(message.spec)
        for instance in self.up:
            self._put(instance, message)
        self._outbox.flush()

    def post(self, instance: InstanceId, message: ToInstance) -> None:
        self._put(instance, message)
        self._outbox.flush()

    def _put(self, instance: InstanceId, message: ToInstance) -> None:
        if isinstance(message, AddModel):
            message = self._add_model(instance, message.spec)
        self._outbox.put(instance, message)

    def _add_model(self, instance: InstanceId, spec: ModelSpec) -> AddModel:
        """The message, with the paths that the model's image has on the instance's machine."""
        return AddModel(self.pool.localised(instance, spec))

    def image_forgotten(self, model: ModelId) -> None:
        self.catalogue.uncached(model)

    def image_damaged(self, model: ModelId, reason: str) -> None:
        self.catalogue.damaged(model, reason)

    def _release(self, proxies: Iterable[ProxyId]) -> None:
        for proxy in proxies:
            self.broadcast(ReleaseProxy(proxy))

    def _answer(self, answers: Iterable[tuple[InstanceId, ToInstance]]) -> None:
        for instance, message in answers:
            self._outbox.put(instance, message)
        if self._check_laws:
            self.host.check()

    def _spec_of(self, model: ModelId) -> ModelSpec | None:
        """The model's spec, if its KV may be reused."""
        served = self.catalogue.models().get(model)
        return served.spec if served and may_reuse(served.spec.directory) else None
