"""From a description of a pool to its outcome."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

from aegis.core.decision import Decision
from aegis.core.effects import PeerWords, StreamName
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, ModelId
from aegis.core.messages import SwitchDone
from aegis.core.model import PEERS_MAX, ModelSpec
from aegis.core.role import Role
from aegis.policies import Policy, Recipe, Site
from aegis.sim.compute_shares import SharedBandwidth
from aegis.sim.event_queue import NEVER_NS, EventQueue
from aegis.sim.fetched_images import Fetch, FetchedImages
from aegis.sim.flows import Bus, Link
from aegis.sim.gpu_costs import GpuSpec
from aegis.sim.instance import SimInstance
from aegis.sim.lane_run import DividedCompute
from aegis.sim.market import SimMarket, SimRequest
from aegis.sim.noise import RunNoise
from aegis.sim.processor_sharing import SharedProcessors
from aegis.sim.sampling import HostUse, Sampler
from aegis.telemetry.decisions import DecisionLog
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span
from decode.core import DecodeCore
from decode.second_lane import LaneOffers
from memory.budget import Budget
from memory.ledger import Ledger
from memory.page_arbiter import PATIENCE_NS, PageArbiter
from memory.peers.links import PeerLinks
from prefill.core import PrefillCore
from proxy.routing.events import InstanceUp, ModelMoved, ModelUp, MoveModel
from proxy.routing.placement import Placement
from proxy.routing.router import Router

PAGE_BYTES = 2 << 20
ADDRESS_PAGES = 1 << 30
FETCH_BYTES_PER_S = 1_250_000_000
"""From a registry, where nobody says otherwise: a network of 10 Gbit/s."""

_PEER_WORDS = PeerWords(requests=((),) * PEERS_MAX, staged=0)  # pieces are not simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Instances, dealt in turn to `devices` GPUs or each with one of its own; `host_kv_bytes` of host memory for all of
    them. `hardware` is what the estimators believe at first, where that is not the GPU's. Requests for `adapters` run
    with their base. The bytes of checkpoints that are `fetched` with a first request come at `fetch_bytes_per_s` for
    all of them, to a cache of `cache_bytes` on the node."""

    recipe: Recipe
    gpu: GpuSpec
    specs: tuple[ModelSpec, ...]
    prefills: int = 0
    decodes: int = 0
    mixed: int = 0
    devices: int | None = None
    idle_ns: int | None = None  # an instance that has been idle for so long is trimmed
    hardware: Hardware | None = None
    slab_bytes: int = 1 << 30
    host_kv_bytes: int = 1 << 40
    keep_times: bool = False
    keep_spans: bool = False
    explains: bool = False  # all that its cores decide
    reuses: bool = False  # KV of requests that have ended
    peer_loads: bool = False  # devices of a node carry parts of each other's demanded loads
    lanes: bool = False  # instances may divide their devices, where policies do
    noise: float = 0.0  # standard deviation of runs, as a share of what they take
    noise_seed: int = 0
    refuses_late: bool = False  # its proxy refuses who would be late
    sample_ns: int = 0  # look at the host's slabs so often; 0: never
    rates: Mapping[ModelId, float] = field(default_factory=dict)  # as policies expect them, tokens per second
    adapters: Mapping[ModelId, ModelId] = field(default_factory=dict)  # and their bases
    fetched: Mapping[ModelId, int] = field(default_factory=dict)  # bytes of lazy models
    fetch_bytes_per_s: int = FETCH_BYTES_PER_S
    cache_bytes: int = 0  # 0: it has no bounds

    def instances(self) -> dict[InstanceId, Role]:
        """The instances with their roles, in order."""
        counts = {Role.PREFILL: self.prefills, Role.DECODE: self.decodes, Role.MIXED: self.mixed}
        return {InstanceId(f"{role}-{i}"): role for role, count in counts.items() for i in range(count)}

    def named(self) -> dict[ModelId, ModelSpec]:
        """All that can be asked for, an adapter as its base."""
        specs = {spec.model: spec for spec in self.specs}
        return specs | {name: specs[base] for name, base in self.adapters.items()}

    def budget(self) -> Budget:
        return Budget(
            pages=self.gpu.memory_bytes // PAGE_BYTES,
            page_bytes=PAGE_BYTES,
            slab_bytes=self.slab_bytes,
            host_slabs=self.host_kv_bytes // self.slab_bytes,
            instances=len(self.instances()),
            on_device=-(-len(self.instances()) // (self.devices or len(self.instances()))),
        )

    @property
    def lane_shares(self) -> tuple[tuple[int, ...], ...]:
        """What devices offer: nothing where several instances have one."""
        alone = self.devices is None or self.devices >= len(self.instances())
        return self.gpu.shares.divisions() if self.lanes and alone and self.gpu.shares else ()

    def gpu_as_wanted(self) -> GpuSpec:
        """The GPU with the overrides of the recipe."""
        gpu, wanted = self.gpu, self.recipe
        if wanted.link_bytes_per_s is not None:
            gpu = replace(gpu, in_bytes_per_s=wanted.link_bytes_per_s, out_bytes_per_s=wanted.link_bytes_per_s)
        if wanted.host_bytes_per_s is not None:
            gpu = replace(gpu, host_bytes_per_s=wanted.host_bytes_per_s)
        return gpu if wanted.switch_ns is None else replace(gpu, switch_ns=wanted.switch_ns)


def stream_words(at: int) -> dict[StreamName, int]:
    """The shared words of instance number `at`."""
    return {stream: at * len(StreamName) + i for i, stream in enumerate(StreamName)}


@dataclass(frozen=True, slots=True)
class _Device:
    """What the instances on a GPU share; its `processors` are shared by all instances of the node."""

    arbiter: PageArbiter
    to_device: Link
    to_host: Link
    processors: SharedProcessors
    links: PeerLinks | None  # of its node


def _devices(agenda: EventQueue, pool: Pool) -> list[_Device]:
    gpu, pages, equal = pool.gpu_as_wanted(), pool.budget().pages, pool.recipe.equal_copies
    idle_ns = NEVER_NS if pool.idle_ns is None else pool.idle_ns
    devices: list[_Device] = []
    for at in range(pool.devices or len(pool.instances())):
        if at % gpu.gpus_per_node == 0:
            bus, processors = Bus(agenda, gpu.host_bytes_per_s), SharedProcessors(gpu.contention)
            links = PeerLinks(gpu.peers_max) if pool.peer_loads and gpu.peers_max else None
        to_device = Link(bus, gpu.in_bytes_per_s, overhead_ns=gpu.copy_ns, equal=equal)
        to_host = Link(bus, gpu.out_bytes_per_s, overhead_ns=gpu.copy_ns, equal=equal)
        devices.append(
            _Device(PageArbiter(pages, idle_ns=idle_ns, patience_ns=PATIENCE_NS), to_device, to_host, processors, links)
        )
    return devices


@dataclass(frozen=True, slots=True)
class Outcome:
    records: list[Record]
    switches: list[SwitchDone]
    spans: list[Span]
    counters: dict[InstanceId, dict[str, int]]
    ended_ns: int
    samples: list[HostUse]
    decisions: list[Decision]
    moves: list[ModelMoved] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)


def simulate(
    pool: Pool,
    arrivals: Iterable[SimRequest],
    *,
    decisions: DecisionLog | None = None,
    orders: Iterable[tuple[int, MoveModel]] = (),
) -> Outcome:
    """Simulates until all requests have ended. `orders` of users come at their times."""
    agenda, gpu, budget = EventQueue(), pool.gpu_as_wanted(), pool.budget()
    hardware = pool.hardware or gpu.hardware()
    site = Site(memory_bytes=gpu.memory_bytes, left=lambda request: market.left(request), rates=pool.rates)
    policy = pool.recipe.policy(site)
    router = Router(
        pool.recipe.prefill(site),
        policy,
        hardware,
        max_batch=policy.rules.max_batch,
        give_up_ns=pool.recipe.give_up_ns,
        explains=pool.explains,
    )
    images = _images(pool, agenda)
    market = SimMarket(
        router,
        agenda,
        specs={spec.model: spec for spec in pool.specs},
        host_slabs=budget.host_slabs,
        message_ns=gpu.handover_ns // 2,  # to the proxy, and from there
        keep_times=pool.keep_times,
        keep_spans=pool.keep_spans,
        decisions=decisions,
        slab_bytes=pool.slab_bytes,
        reuses=pool.reuses,
        placement=_placement(pool, site, hardware),
        refuses_late=pool.refuses_late,
        adapters=pool.adapters,
        images=images,
    )
    for spec in pool.specs:
        market.tell(ModelUp(spec, budget.device_tokens(spec.manifest.image_bytes, spec.manifest.kv)))
    cores = _cores(pool, policy, hardware)
    _bring_up(pool, market, cores, at_once=decisions is not None)
    for at_ns, order in orders:
        agenda.at(at_ns, market.tell, order)
    sampler = Sampler(agenda, pool.sample_ns, [core.ledger for core in cores.values()]) if pool.sample_ns else None
    with _uncollected():
        market.run(arrivals)
    counters = {name: asdict(core.counters) for name, core in cores.items()}
    return Outcome(
        market.records,
        market.switches,
        market.spans or [],
        counters,
        agenda.now_ns,
        sampler.samples if sampler else [],
        market.decided,
        market.moves,
        images.fetches if images else [],
    )


def _images(pool: Pool, agenda: EventQueue) -> FetchedImages | None:
    if not pool.fetched:
        return None
    return FetchedImages(
        agenda,
        bytes_per_s=pool.fetch_bytes_per_s,
        limit_bytes=pool.cache_bytes,
        fetched=pool.fetched,
        images={spec.model: spec.manifest.image_bytes for spec in pool.specs},
    )


def _placement(pool: Pool, site: Site, hardware: Hardware) -> Placement | None:
    made = pool.recipe.placement
    return Placement(made(site), hardware) if made else None


def _divided(gpu: GpuSpec, specs: Mapping[ModelId, ModelSpec]) -> DividedCompute:
    """The compute of one instance's device, which lanes divide."""
    assert gpu.shares is not None

    def reading_share(model: ModelId, context_tokens: int, rows: int) -> float:
        return gpu.reading_share(specs[model], context_tokens, rows)

    return DividedCompute(gpu.shares, SharedBandwidth(), reading_share)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turns the collector off: nothing here is cyclic, and it would look through more and more that is alive."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _cores(pool: Pool, policy: Policy, hardware: Hardware) -> dict[InstanceId, PrefillCore | DecodeCore]:
    cores: dict[InstanceId, PrefillCore | DecodeCore] = {}
    shares = pool.gpu.shares if pool.recipe.profiled else None
    profile = shares.worst_decode_factor if shares else None
    for at, (name, role) in enumerate(pool.instances().items()):
        ledger = Ledger(
            pool.budget(),
            stream_words(at),
            address_pages=ADDRESS_PAGES,
            peer_words=_PEER_WORDS if pool.peer_loads and pool.gpu_as_wanted().peers_max else None,
            images_in_memory=True,
        )
        if role is Role.PREFILL:
            cores[name] = PrefillCore(
                name, ledger, pool.recipe.order, hardware, explains=pool.explains, reuses=pool.reuses
            )
        else:
            cores[name] = DecodeCore(
                name,
                ledger,
                policy,
                hardware,
                explains=pool.explains,
                reuses=pool.reuses,
                lanes=LaneOffers(pool.lane_shares, profile=profile),
            )
    return cores


def _bring_up(
    pool: Pool, market: SimMarket, cores: Mapping[InstanceId, PrefillCore | DecodeCore], *, at_once: bool
) -> None:
    """`at_once`: instances hear of all models before anything else."""
    gpu, roles = pool.gpu_as_wanted(), pool.instances()
    specs = {spec.model: spec for spec in pool.specs}
    costs = {spec.model: gpu.costs(spec) for spec in pool.specs}
    devices = _devices(market.agenda, pool)
    reports = pool.idle_ns is not None or len(devices) < len(roles)
    for at, (name, role) in enumerate(roles.items()):
        device = devices[at % len(devices)]
        instance = SimInstance(
            name,
            cores[name],
            agenda=market.agenda,
            watch=market,
            semaphores=market.semaphores,
            to_device=device.to_device,
            to_host=device.to_host,
            costs=costs,
            specs=specs,
            switch_ns=gpu.switch_ns,
            run_ns=gpu.run_ns,
            processors=device.processors,
            divided=_divided(gpu, specs) if pool.lane_shares else None,
            reports=reports,
            by_layers=pool.recipe.by_layers,
            skips_kept=role is Role.PREFILL and not pool.reuses,
            noise=RunNoise(pool.noise, pool.noise_seed, name) if pool.noise else None,
            peer_bytes_per_s=gpu.peer_bytes_per_s // max(gpu.peers_max, 1),
        )
        place, memory_bytes = at % len(devices), pool.gpu.memory_bytes
        market.join(instance, device.arbiter, device.links, device=place, memory_bytes=memory_bytes)
        if reports or at_once:
            instance.add_models()
        market.tell(InstanceUp(name, role))
    if reports:
        market.watch()
    market.place()
