"""All the memory of one instance in one set of books: pages, weights, KV slabs of device and host, transfers.

A `Ledger` counts and says what has to be done to bytes; it touches none. Operations append to `effects`, which its core
drains in order. `check` proves every law at any moment (rule 3).

Laws: (M1) the pages of resident and loading models and of device KV slabs are all the pages in use; (M2) pages back
exactly the device slabs that hold blocks; (M3) a leased host slab holds blocks or is idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from aegis.core.effects import (
    Bind,
    CopyBlocks,
    Effect,
    LoadWeights,
    MapKv,
    MapWeights,
    StreamName,
    Unbind,
    UnmapKv,
    UnmapWeights,
)
from aegis.core.errors import LawBroken
from aegis.core.ids import BlockId, ModelId, PageId, SlabId
from aegis.core.model import KvShape, ModelSpec
from aegis.core.request import EventHandle
from memory.bump import BumpBuffer
from memory.pages import NoPages, PagePool
from memory.residency import Residency
from memory.slabs import SlabPool
from memory.transfers import Transfers

_KV_OWNER = "kv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What an instance may hold. `pages` bounds weights and KV together."""

    pages: int
    page_bytes: int
    slab_bytes: int
    host_slabs: int  # of the node's region, which its instances share
    instances: int  # that share it

    @property
    def pages_per_slab(self) -> int:
        return self.slab_bytes // self.page_bytes

    def weight_pages(self, image_bytes: int) -> int:
        return -(-image_bytes // self.page_bytes)

    def sequence_tokens(self, spec_bytes: int, shape: KvShape) -> int:
        """The longest sequence whose KV fits on the device beside the model's weights, and in the host region while
        every other instance keeps a slab. 0 or less: the model cannot be served."""
        if shape.block_bytes > self.slab_bytes:
            return 0
        on_device = (self.pages - self.weight_pages(spec_bytes)) // self.pages_per_slab
        in_host = self.host_slabs - self.instances + 1
        return min(on_device, in_host) * (self.slab_bytes // shape.block_bytes) * shape.block_tokens


class _DeviceSlabs:
    """Slabs of the device's KV range, backed by pages from the pool only while they are held."""

    def __init__(self, pool: PagePool, pages_per_slab: int, effects: list[Effect]) -> None:
        self._pool, self._size, self._effects = pool, pages_per_slab, effects
        count = pool.capacity // pages_per_slab
        self._slots = [SlabId(slot) for slot in range(count - 1, -1, -1)]
        self._pages: dict[SlabId, tuple[PageId, ...]] = {}

    def available(self) -> int:
        return self._pool.free // self._size

    def take(self) -> SlabId:
        slab = self._slots.pop()
        pages = self._pool.take(_KV_OWNER, self._size, high=True)
        assert not isinstance(pages, NoPages)
        self._pages[slab] = pages
        self._effects.append(MapKv(slab, pages))
        return slab

    def give(self, slab: SlabId) -> None:
        self._pool.give(_KV_OWNER, self._pages.pop(slab))
        self._slots.append(slab)
        self._effects.append(UnmapKv(slab))

    @property
    def pages(self) -> int:
        return len(self._pages) * self._size


class _LeasedSlabs:
    """Slabs of the node's host region that are leased to this instance."""

    def __init__(self) -> None:
        self._idle: list[SlabId] = []
        self.leased: set[SlabId] = set()

    def available(self) -> int:
        return len(self._idle)

    def take(self) -> SlabId:
        return self._idle.pop()

    def give(self, slab: SlabId) -> None:
        self._idle.append(slab)

    def grant(self, slabs: Iterable[SlabId]) -> None:
        for slab in slabs:
            assert slab not in self.leased
            self.leased.add(slab)
            self._idle.append(slab)

    def surplus(self, keep: int) -> tuple[SlabId, ...]:
        """Idle slabs beyond `keep`, no longer ours."""
        gone = tuple(self._idle.pop() for _ in range(len(self._idle) - keep))
        self.leased.difference_update(gone)
        return gone


class Ledger:
    """The books of one instance."""

    def __init__(self, budget: Budget, words: Mapping[StreamName, int], *, address_pages: int) -> None:
        self.budget = budget
        self.effects: list[Effect] = []
        self.specs: dict[ModelId, ModelSpec] = {}
        self.transfers = Transfers(words)
        self.pool = PagePool(budget.pages)
        self._ranges = BumpBuffer(address_pages)
        self.weights = Residency(self.pool, self._ranges)
        self._device_slabs = _DeviceSlabs(self.pool, budget.pages_per_slab, self.effects)
        self._leases = _LeasedSlabs()
        self.device = SlabPool(budget.slab_bytes, self._device_slabs)
        self.host = SlabPool(budget.slab_bytes, self._leases)

    def add_model(self, spec: ModelSpec) -> bool:
        """Gives the model its permanent range; false when the address space is used up."""
        assert spec.model not in self.specs
        offset = self._ranges.place(spec.model, self.budget.weight_pages(spec.manifest.image_bytes))
        if offset is None:
            return False
        self.specs[spec.model] = spec
        self.weights.add(spec.model)
        self.effects.append(Bind(spec, offset))
        return True

    def drop_model(self, model: ModelId) -> None:
        """The model must not be loading and no block of its sequences be left."""
        if self.weights.is_resident(model):
            self.evict(model)
        self.weights.remove(model)
        self._ranges.release(model)
        del self.specs[model]
        self.effects.append(Unbind(model))

    def load(self, model: ModelId, expendable: Sequence[ModelId], *, spare: int = 0) -> EventHandle | NoPages:
        """Starts bringing the model in, evicting from `expendable` as far as needed. Promotion later is free."""
        admitted = self.weights.admit(model, expendable, spare=spare)
        if isinstance(admitted, NoPages):
            return admitted
        self.effects += [UnmapWeights(victim) for victim in admitted.evicted]
        self.effects.append(MapWeights(model, admitted.pages))
        event = self.transfers.next(StreamName.WEIGHTS)
        self.effects.append(LoadWeights(model, event))
        self.weights.start_loading(model, event)
        return event

    def evict(self, model: ModelId) -> None:
        self.weights.evict(model)
        self.effects.append(UnmapWeights(model))

    def copy_in(
        self, shape: KvShape, host: Sequence[BlockId], device: Sequence[BlockId], after: EventHandle
    ) -> EventHandle:
        """Host to device; rule 2: `after` is the last transfer of the host blocks."""
        return self._copy(StreamName.SWAP_IN, shape, host, device, after)

    def copy_out(self, shape: KvShape, device: Sequence[BlockId], host: Sequence[BlockId]) -> EventHandle:
        """Device to host. The device blocks hold their content already: a step or a swap-in has finished."""
        return self._copy(StreamName.SWAP_OUT, shape, device, host, None)

    def progress(self, stream: StreamName, value: int) -> None:
        """Books what a stream has completed: models that are loaded now, blocks that nothing moves any more."""
        self.transfers.progress(stream, value)
        for model, event in self.weights.loading():
            if self.transfers.passed(event):
                self.weights.loaded(model)
        self.device.reclaim(self.transfers.passed)
        self.host.reclaim(self.transfers.passed)

    def grant(self, slabs: Iterable[SlabId]) -> None:
        self._leases.grant(slabs)

    def surplus_slabs(self, *, keep: int = 1) -> tuple[SlabId, ...]:
        return self._leases.surplus(keep)

    def drain(self) -> list[Effect]:
        effects = list(self.effects)
        self.effects.clear()
        return effects

    def accounts(self) -> dict[str, int]:
        """Counts of now, for telemetry."""
        device, host = self.device.use().values(), self.host.use().values()
        return {
            "device_pages": self.pool.capacity,
            "device_pages_free": self.pool.free,
            "device_pages_weights": self._weight_pages(self.weights.resident()),
            "device_pages_loading": self._weight_pages(model for model, _ in self.weights.loading()),
            "device_pages_kv": self._device_slabs.pages,
            "device_blocks_used": sum(u.used for u in device),
            "device_blocks_reserved": sum(u.reserved for u in device),
            "device_blocks_in_transfer": sum(u.moving for u in device),
            "host_slabs_leased": len(self._leases.leased),
            "host_slabs_idle": self._leases.available(),
            "host_blocks_used": sum(u.used for u in host),
            "host_blocks_reserved": sum(u.reserved for u in host),
            "host_blocks_in_transfer": sum(u.moving for u in host),
            "transfers_in_flight": self.transfers.in_flight,
        }

    def check(self) -> None:
        """Raises LawBroken where any law of the books does not hold."""
        for part in (self.pool, self._ranges, self.weights, self.device, self.host):
            part.check()
        weights = self._weight_pages(self.weights.resident()) + self._weight_pages(m for m, _ in self.weights.loading())
        if weights + self._device_slabs.pages != self.pool.used:
            raise LawBroken(f"M1: {weights} weight + {self._device_slabs.pages} KV pages != {self.pool.used} used")
        held = sum(use.slabs for use in self.device.use().values())
        if held * self.budget.pages_per_slab != self._device_slabs.pages:
            raise LawBroken(f"M2: {held} device slabs held, {self._device_slabs.pages} pages behind them")
        held = sum(use.slabs for use in self.host.use().values())
        if held + self._leases.available() != len(self._leases.leased):
            raise LawBroken(f"M3: {held} host slabs held + idle ones != {len(self._leases.leased)} leased")

    def _weight_pages(self, models: Iterable[ModelId]) -> int:
        return sum(self._ranges.pages(model) for model in models)

    def _copy(
        self,
        stream: StreamName,
        shape: KvShape,
        source: Sequence[BlockId],
        target: Sequence[BlockId],
        after: EventHandle | None,
    ) -> EventHandle:
        event = self.transfers.next(stream)
        pairs = tuple(zip(source, target, strict=True))
        self.effects.append(CopyBlocks(stream, shape, pairs, after, event))
        return event
