"""The parts of an instance, opened as its settings say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aegis.core.clock import Clock
from aegis.core.effects import StreamName
from aegis.core.ids import InstanceId
from aegis.core.role import Role
from aegis.device.cached_images import CachedImages
from aegis.device.divisions import WHOLE, Shares
from aegis.device.memory_executor import MemoryExecutor
from aegis.device.open_device import open_device
from aegis.device.peer_transfers import PEER_WORDS, PeerTransfers
from aegis.device.protocol import Device
from aegis.device.shared_events import SharedWords
from aegis.device.stage_buffer import StageBuffer
from aegis.engine.engines import Engines
from aegis.engine.parallel.group import ProcessGroup
from aegis.engine.protocol import Engine, KvRegion
from aegis.engine.sampler import Sampler
from aegis.instance.first_rank import FirstRankEngine, FirstRankImages, FirstRankMemory
from aegis.instance.lane_offer import lane_shares
from aegis.instance.rank_wire import FollowerLinks
from aegis.instance.settings import InstanceSettings
from aegis.process.clock import MonotonicClock, ThreadClock
from aegis.telemetry.decisions import DecisionLog
from aegis.transport.links import InstanceLink
from decode.core import DecodeCore
from decode.second_lane import LaneOffers
from memory.budget import Budget
from memory.ledger import Ledger
from prefill.core import PrefillCore

ADDRESS_PAGES = 1 << 22
"""Address space for weights: 8 TiB of 2 MiB pages. It costs nothing until something is mapped."""

_TRANSFER_POLL_S = 0.0001


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceParts:
    """`pause` is called with nothing to do while copies are in flight, until one may have ended, at most to a time.
    `processor` goes on while this thread has one, where that is what runs take. `lane_shares` are what the device can
    be divided into. `initialisations` says how many engines this process has initialised."""

    instance: InstanceId
    role: Role
    core: PrefillCore | DecodeCore
    engine: Engine
    initialisations: Callable[[], int]
    device: Device
    images: CachedImages | FirstRankImages
    memory_executor: MemoryExecutor | FirstRankMemory
    link: InstanceLink
    clock: Clock
    pause: Callable[[int], None]
    check_laws: bool = False
    decisions: DecisionLog | None = None
    processor: Clock | None = None
    clock_ahead_ns: int = 0
    lane_shares: tuple[Shares, ...] = (WHOLE,)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of one rank."""

    device: Device
    images: CachedImages
    stage: StageBuffer
    peers: PeerTransfers | None
    memory_executor: MemoryExecutor

    def engines(self, settings: InstanceSettings, sampler: Sampler | None = None) -> Engines:
        """Waits for the other ranks. Raises UserError if the engine is not installed, RuntimeError if the ranks do not
        come."""
        region = KvRegion(self.memory_executor.kv.base, self.memory_executor.kv.nbytes, settings.slab_bytes)
        if settings.ranks == 1:
            return Engines(region, device=self.device.name, first=settings.engine)
        rendezvous = f"{settings.rendezvous}-store"
        group = ProcessGroup.join(rendezvous, settings.rank, settings.ranks, device=self.device.name)
        return Engines(region, device=self.device.name, first=settings.engine, sampler=sampler, group=group)


def open_rank_memory(settings: InstanceSettings) -> RankMemory:
    """Raises UserError."""
    words = SharedWords.open(settings.words_path)
    streams = len(settings.words) - PEER_WORDS - 1
    device = open_device(settings.device, settings.device_address, words, stream_words=settings.words[:streams])
    host = device.open_host(settings.host_kv_path, writable=True, populate=False)
    images = CachedImages(device, settings.images_path)
    stage = StageBuffer(device, words, settings.words[-1])
    peers = PeerTransfers(device, words, settings.words[streams:-1]) if settings.peer_loads else None
    memory_executor = MemoryExecutor(
        device,
        host,
        images,
        stage,
        slab_bytes=settings.slab_bytes,
        address_pages=ADDRESS_PAGES,
        rank=settings.rank,
        peers=peers,
    )
    return RankMemory(device, images, stage, peers, memory_executor)


@contextmanager
def open_parts(settings: InstanceSettings) -> Iterator[InstanceParts]:
    """Raises UserError. Nothing is closed after an error: copies that go nowhere would be waited for."""
    link = InstanceLink(settings.address, settings.identity, settings.market_key)
    body = open_rank_memory(settings)
    device, engines = body.device, body.engines(settings)
    shares = lane_shares(settings, device)
    followers = FollowerLinks(settings.rendezvous, settings.ranks) if settings.ranks > 1 else None
    yield InstanceParts(
        instance=settings.instance,
        role=settings.role,
        core=_core(settings, body, LaneOffers(shares, timed=device.lanes_are_timed)),
        engine=FirstRankEngine(engines, followers) if followers else engines,
        initialisations=lambda: engines.initialisations,
        device=device,
        images=FirstRankImages(body.images, followers.send) if followers else body.images,
        memory_executor=FirstRankMemory(body.memory_executor, followers) if followers else body.memory_executor,
        link=link,
        clock=MonotonicClock(settings.clock_ahead_ns),
        clock_ahead_ns=settings.clock_ahead_ns,
        processor=ThreadClock() if device.name == "cpu" else None,
        pause=poll,
        check_laws=settings.check_laws,
        lane_shares=shares,
    )
    if followers:
        followers.close()
    if body.peers:
        body.peers.close()
    for part in (body.stage, body.images, device, link):
        part.close()


def poll(until_ns: int) -> None:
    """Nothing signals the end of a copy, so it is looked for again soon."""
    time.sleep(_TRANSFER_POLL_S)


def _core(settings: InstanceSettings, body: RankMemory, lanes: LaneOffers) -> PrefillCore | DecodeCore:
    device = body.device
    budget = Budget(
        pages=device.page_count,
        page_bytes=device.page_bytes,
        slab_bytes=settings.slab_bytes,
        host_slabs=settings.host_slabs,
        instances=settings.instances,
        on_device=settings.on_device,
    )
    ledger = Ledger(
        budget,
        {name: body.memory_executor.words[name] for name in StreamName},
        address_pages=ADDRESS_PAGES,
        peer_words=body.peers.words if body.peers else None,
    )
    if settings.role is Role.PREFILL:
        order = settings.prefill_order()
        return PrefillCore(
            settings.instance,
            ledger,
            order,
            settings.hardware,
            machine=settings.machine,
            explains=settings.explains,
            reuses=settings.reuses,
            step_tokens=settings.step_tokens,
        )
    return DecodeCore(
        settings.instance,
        ledger,
        settings.scheduler(),
        settings.hardware,
        machine=settings.machine,
        explains=settings.explains,
        reuses=settings.reuses,
        lanes=lanes,
    )
