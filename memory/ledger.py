"""All accounts of one instance's memory: pages, weights, KV slabs of device and host, transfers.

A `Ledger` counts, and says what has to be done to bytes; it touches none. Operations append to `effects`, which its
core drains in order. `check` proves every law at any moment (rule 3).

The pages are those that the device has lent (`Balloon`): weights and KV grow at each other's cost and at that of other
instances.

Laws: (M1) the pages of resident and loading models and of device KV slabs, and those lent to a peer's load, are all the
pages in use; (M2) pages back exactly the device slabs that hold blocks; (M3) a leased host slab holds blocks or is
idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from msgspec.structs import replace

from aegis.core.block_runs import BlockCopy, paired
from aegis.core.effects import (
    AbandonLoad,
    Bind,
    CopyBlocks,
    Effect,
    LoadWeights,
    MapWeights,
    MoveBlocks,
    PeerWords,
    Send,
    StreamName,
    Unbind,
    UnmapWeights,
)
from aegis.core.errors import LawBroken
from aegis.core.ids import BlockRun, ModelId, PageRun, SlabId
from aegis.core.messages import (
    CarryImage,
    EvictImage,
    GrantPages,
    ImageCached,
    ImageEvicted,
    ModelUnloaded,
    PeerReady,
    SetSlo,
    SlabsOfShape,
    UnloadModel,
)
from aegis.core.model import KvShape, ModelSpec
from aegis.core.request import EventHandle
from memory.balloon import Balloon, PageRequestState
from memory.budget import Budget
from memory.bump_buffer import BumpBuffer
from memory.copy_events import Transfers
from memory.pages import NoPages, PagePool
from memory.peers.loads import PeerLoads
from memory.residency import Residency
from memory.slab_pool import SlabPool
from memory.slab_sources import DeviceSlabs, LeasedSlabs


class Ledger:
    """The accounts of one instance."""

    def __init__(
        self,
        budget: Budget,
        words: Mapping[StreamName, int],
        *,
        address_pages: int,
        peer_words: PeerWords | None = None,
        images_in_memory: bool = False,
    ) -> None:
        """With `peer_words` demanded loads are shared with peers, as `PeerLoads` has it."""
        self.budget = budget
        self.effects: list[Effect] = []
        self.specs: dict[ModelId, ModelSpec] = {}
        self.adapters: set[ModelId] = set()  # among them
        self._shapes: dict[KvShape, KvShape] = {}  # models of one shape share it: finding its slabs compares nothing
        self.transfers = Transfers(words)
        self.pool = PagePool()
        self.balloon = Balloon(self.pool, self.transfers, self.effects)
        self._ranges = BumpBuffer(address_pages)
        self.weights = Residency(self.pool, self._ranges)
        per_slab = budget.pages_per_slab
        self._device_slabs = DeviceSlabs(self.pool, budget.pages // per_slab, per_slab, self.effects)
        self._leases = LeasedSlabs()
        self._cached: dict[ModelId, tuple[PageRun, ...]] = {}  # images in the node's model cache
        self._peers = PeerLoads(
            self.pool,
            self.balloon,
            self.transfers,
            self.effects,
            peer_words,
            page_bytes=budget.page_bytes,
            in_memory=images_in_memory,
        )
        self._evicting: set[ModelId] = set()  # images to be let go of once no load reads them
        self.unloading: set[ModelId] = set()  # models to be evicted once no request here needs them
        self.device = SlabPool(budget.slab_bytes, self._device_slabs, self.transfers.passed)
        self.host = SlabPool(budget.slab_bytes, self._leases, self.transfers.passed)

    def add_model(self, spec: ModelSpec) -> bool:
        """Gives the model its permanent range; false when the address space is used up."""
        assert spec.model not in self.specs
        offset = self._ranges.place(spec.model, self.budget.weight_pages(spec.manifest.image_bytes))
        if offset is None:
            return False
        shape = self._shapes.setdefault(spec.manifest.kv, spec.manifest.kv)
        if shape is not spec.manifest.kv:
            spec = replace(spec, manifest=replace(spec.manifest, kv=shape))
        self.specs[spec.model] = spec
        if spec.base is not None:
            self.adapters.add(spec.model)
        self.weights.add(spec.model)
        self.effects.append(Bind(spec, offset))
        return True

    def base_of(self, spec: ModelSpec) -> ModelSpec:
        """The model whose weights and KV its sequences need: its base, or itself."""
        return spec if spec.base is None else self.specs[spec.base]

    def drop_model(self, model: ModelId) -> None:
        """The model must not be loading, and no block of its sequences may be left."""
        if self.weights.is_resident(model):
            self.evict(model)
        self.weights.remove(model)
        self._ranges.release(model)
        del self.specs[model]
        self.adapters.discard(model)
        self.unloading.discard(model)
        self.effects.append(Unbind(model))

    def load(
        self, model: ModelId, expendable: Sequence[ModelId], *, spare: int = 0, prefetch: bool = False
    ) -> EventHandle | NoPages:
        """Starts to load the model, evicting from `expendable` as far as needed. To run a model that was prefetched
        costs nothing more."""
        admitted = self.weights.admit(model, expendable, spare=spare)
        if isinstance(admitted, NoPages):
            return admitted
        self.effects += [UnmapWeights(victim) for victim in admitted.evicted]
        self.effects.append(MapWeights(model, admitted.runs))
        stream = StreamName.PREFETCH if prefetch else StreamName.WEIGHTS
        event = self.transfers.next(stream)
        nbytes, cached = self.specs[model].manifest.image_bytes, self._cached.get(model, ())
        shared = not prefetch and self._peers.may_share(nbytes, cached)
        self.effects.append(LoadWeights(stream, model, event, cached, shared))
        if shared:
            self._peers.began(event, nbytes, cached)
        self.weights.start_loading(model, event)
        return event

    def abandon(self, model: ModelId) -> None:
        """The loading model is not wanted any more: its pages come back when the copy has stopped."""
        self.effects.append(AbandonLoad(self.weights.abandon(model)))

    def evict(self, model: ModelId) -> None:
        self.weights.evict(model)
        self.effects.append(UnmapWeights(model))

    def unload(self, in_use: Set[ModelId]) -> None:
        """Models that are to leave do so once they are not in use, and their `ModelUnloaded` is sent. A load under way
        ends first."""
        for model in sorted(self.unloading - in_use):
            if self.weights.is_loading(model):
                continue
            if self.weights.is_resident(model):
                self.evict(model)
            self.unloading.remove(model)
            self.effects.append(Send(ModelUnloaded(model)))

    def must_wait(self, pages: int, *, crowded: bool = False) -> bool:
        """Whether the device has to answer before anything is evicted for lack of so many free pages."""
        if pages <= self.pool.free:
            return False
        self.balloon.want(pages - self.pool.free, urgent=False, crowded=crowded)
        return self.balloon.request_state is PageRequestState.ASKED

    def kv_pages(self, shape: KvShape, blocks: int) -> int:
        """The free pages that so many more blocks need."""
        return self.device.slabs_for(shape, blocks) * self.budget.pages_per_slab

    def on_message(
        self, message: GrantPages | ImageCached | EvictImage | SetSlo | UnloadModel | CarryImage | PeerReady
    ) -> None:
        """Takes messages of the owners of the device's pages, of the node's model cache and of its models. An eviction
        is answered once no load reads from the cache what may be overwritten then."""
        match message:
            case GrantPages():
                self.balloon.granted(message)
                self._peers.granted()
            case ImageCached(model, extents):
                self._cached[model] = extents
            case EvictImage(model):
                self._cached.pop(model, None)
                self._evicting.add(model)
                self._let_images_go()
            case CarryImage() | PeerReady():
                self._peers.on_message(message)
            case UnloadModel(model) if model in self.specs:
                self.unloading.add(model)
            case UnloadModel(model):
                self.effects.append(Send(ModelUnloaded(model)))
            case SetSlo(model, slo):
                if model in self.specs:
                    self.specs[model] = replace(self.specs[model], slo=slo)

    def copy_in(
        self,
        shape: KvShape,
        host: Sequence[BlockRun],
        device: Sequence[BlockRun],
        after: EventHandle | None,
        *,
        ahead: bool = False,
    ) -> EventHandle:
        """Host to device, perhaps `ahead` of a turn that waits for it; rule 2: `after` is the last transfer of the host
        blocks, None if that was over long ago."""
        return self._copy(StreamName.SWAP_IN, shape, host, device, after, ahead=ahead)

    def copy_out(
        self, shape: KvShape, device: Sequence[BlockRun], host: Sequence[BlockRun], *, ahead: bool = False
    ) -> EventHandle:
        """Device to host. The device blocks hold their content already: a step or a swap-in has finished. `ahead`: no
        turn waits for the room."""
        return self._copy(StreamName.SWAP_OUT, shape, device, host, None, ahead=ahead)

    def copy_within(self, shape: KvShape, source: Sequence[BlockRun], target: Sequence[BlockRun]) -> None:
        """Copies blocks of the device to others there, before anything else is done."""
        self.effects.append(MoveBlocks(shape, paired(source, target)))

    def compact(self, shape: KvShape, blocks: Sequence[BlockRun]) -> tuple[BlockCopy, ...]:
        """Empties a slab of the device into holes of others: from where to where, in the order of its blocks."""
        at = len(self.effects)
        copies = self.device.compact(shape, blocks)
        self.effects.insert(at, MoveBlocks(shape, copies))  # then it is unmapped
        return copies

    def progress(self, stream: StreamName, value: int) -> None:
        """Books the completions of a stream: models that are loaded now, blocks that nothing moves any more."""
        self.transfers.progress(stream, value)
        for model, event in self.weights.loading():
            if self.transfers.passed(event) and not self.weights.loaded(model):
                self.evict(model)
        if self.device.moving:
            self.device.reclaim()
        if self.host.moving:
            self.host.reclaim()
        self.balloon.progress()
        self._peers.progress()
        if self._evicting:
            self._let_images_go()

    def grant(self, slabs: Iterable[SlabId]) -> None:
        self._leases.grant(slabs)

    def surplus_slabs(self, *, keep: int = 1) -> tuple[SlabId, ...]:
        return self._leases.surplus(keep)

    def drain(self) -> list[Effect]:
        effects = list(self.effects)
        self.effects.clear()
        return effects

    def accounts(self) -> dict[str, int]:
        """Present counts, for telemetry."""
        device, host = self.device.use().values(), self.host.use().values()
        return {
            "device_pages": self.balloon.held,
            "device_pages_free": self.pool.free,
            "device_pages_weights": self._weight_pages(self.weights.resident()),
            "device_pages_loading": self._weight_pages(model for model, _ in self.weights.loading()),
            "device_pages_kv": self._device_slabs.pages,
            "device_pages_lent": self._peers.lent,
            "device_pages_retired": self.balloon.retired,
            "device_pages_leaving": self.balloon.leaving,
            "address_pages_reserved": self._ranges.capacity,
            "address_pages_placed": self._ranges.placed,
            "address_pages_kv": self.budget.pages // self.budget.pages_per_slab * self.budget.pages_per_slab,
            "device_blocks_used": sum(u.used for u in device),
            "device_blocks_reserved": sum(u.reserved for u in device),
            "device_blocks_in_transfer": sum(u.moving for u in device),
            "host_slabs_leased": len(self._leases.leased),
            "host_slabs_idle": self._leases.available(),
            "host_blocks_used": sum(u.used for u in host),
            "host_blocks_reserved": sum(u.reserved for u in host),
            "host_blocks_in_transfer": sum(u.moving for u in host),
            "transfers_in_flight": self.transfers.in_flight,
        } | {f"transfers_in_flight_{name}": count for name, count in self.transfers.by_stream().items()}

    def shapes(self) -> tuple[SlabsOfShape, ...]:
        """The slabs of each shape, for telemetry."""
        return tuple(
            SlabsOfShape(
                region=region,
                models=tuple(model for model, spec in self.specs.items() if spec.manifest.kv == shape),
                slab_bytes=use.slab_bytes,
                block_bytes=use.block_bytes,
                slabs=use.slabs,
                free_blocks=use.free,
                reserved_blocks=use.reserved,
                used_blocks=use.used,
                moving_blocks=use.moving,
            )
            for region, pool in (("device", self.device), ("host", self.host))
            for shape, use in pool.use().items()
        )

    def check(self) -> None:
        """Raises LawBroken if any law of the accounts does not hold."""
        for part in (self.pool, self.balloon, self._ranges, self.weights, self.device, self.host, self._peers):
            part.check()
        weights = self._weight_pages(self.weights.resident()) + self._weight_pages(m for m, _ in self.weights.loading())
        kv, lent = self._device_slabs.pages, self._peers.lent
        if weights + kv + lent != self.pool.used:
            raise LawBroken(f"M1: {weights} weight + {kv} KV + {lent} lent pages != {self.pool.used} used")
        held = sum(use.slabs for use in self.device.use().values())
        if held * self.budget.pages_per_slab != self._device_slabs.pages:
            raise LawBroken(f"M2: {held} device slabs held, {self._device_slabs.pages} pages behind them")
        held = sum(use.slabs for use in self.host.use().values())
        if held + self._leases.available() != len(self._leases.leased):
            raise LawBroken(f"M3: {held} host slabs held + idle ones != {len(self._leases.leased)} leased")

    def _let_images_go(self) -> None:
        for model in sorted(self._evicting):
            if model not in self.specs or not self.weights.is_loading(model):
                self._evicting.remove(model)
                self.effects.append(Send(ImageEvicted(model)))

    def _weight_pages(self, models: Iterable[ModelId]) -> int:
        return sum(self._ranges.pages(model) for model in models)

    def _copy(
        self,
        stream: StreamName,
        shape: KvShape,
        source: Sequence[BlockRun],
        target: Sequence[BlockRun],
        after: EventHandle | None,
        *,
        ahead: bool = False,
    ) -> EventHandle:
        event = self.transfers.next(stream)
        self.effects.append(CopyBlocks(stream, shape, paired(source, target), after, event, ahead))
        return event
