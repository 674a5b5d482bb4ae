"""Does to bytes what a ledger has counted: maps pages, loads weights, copies KV blocks, reports progress."""

from __future__ import annotations

from collections.abc import Mapping

from aegis.core.effects import (
    Bind,
    CopyBlocks,
    LoadWeights,
    MapKv,
    MapWeights,
    StreamName,
    Unbind,
    UnmapKv,
    UnmapWeights,
)
from aegis.core.events import Progress
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.device.base import Device, HostRegion

MemoryEffect = Bind | Unbind | MapKv | UnmapKv | MapWeights | UnmapWeights | LoadWeights | CopyBlocks


class Mover:
    """One instance's memory: a range for weights, one for KV slabs, the node's host slabs and three streams."""

    def __init__(self, device: Device, host: HostRegion, *, slab_bytes: int, address_pages: int) -> None:
        self._device = device
        self._host = host
        self._slab_bytes = slab_bytes
        self._pages_per_slab = slab_bytes // device.page_bytes
        self._weights = device.reserve(address_pages * device.page_bytes)
        slabs = device.page_count // self._pages_per_slab
        self.kv = device.reserve(slabs * slab_bytes)
        self._streams = {name: device.stream(name.value) for name in StreamName}
        self._seen = dict.fromkeys(StreamName, 0)
        self._submitted = dict.fromkeys(StreamName, 0)
        self._opened: dict[tuple[ModelId, str], HostRegion] = {}  # by name and fingerprint, for `Bind`
        self._images: dict[ModelId, HostRegion] = {}
        self._bound: dict[ModelId, Bind] = {}

    @property
    def words(self) -> Mapping[StreamName, int]:
        """The shared word of each stream."""
        return {name: stream.word for name, stream in self._streams.items()}

    @property
    def in_flight(self) -> bool:
        return self._seen != self._submitted

    def weights_base(self, bind: Bind) -> int:
        return self._weights.base + bind.offset_pages * self._device.page_bytes

    def prepare(self, spec: ModelSpec) -> None:
        """Opens the image that `Bind` will need, which takes 200 ms per GiB. May be left out, and may run in another
        thread beside everything else.

        Raises UserError where there is nothing to open.
        """
        self._opened[spec.model, spec.manifest.fingerprint] = self._device.open_host(spec.image_path, writable=False)

    def discard(self, spec: ModelSpec) -> None:
        """Closes what `prepare` opened and no `Bind` took; from the same thread."""
        image = self._opened.pop((spec.model, spec.manifest.fingerprint), None)
        if image is not None:
            image.close()

    def perform(self, effect: MemoryEffect) -> None:
        """Maps at once, copies asynchronously. Raises OSError where the system refuses, UserError where there is no
        image to bind; the `Unbind` of a model that is not bound does nothing."""
        match effect:
            case Bind(spec):
                image = self._opened.pop((spec.model, spec.manifest.fingerprint), None)
                self._images[spec.model] = image or self._device.open_host(spec.image_path, writable=False)
                self._bound[spec.model] = effect
            case Unbind(model):
                if self._bound.pop(model, None):
                    self._images.pop(model).close()
            case MapKv(slab, pages):
                self.kv.map(slab * self._pages_per_slab, pages)
            case UnmapKv(slab):
                self.kv.unmap(slab * self._pages_per_slab, self._pages_per_slab)
            case MapWeights(model, pages):
                self._weights.map(self._bound[model].offset_pages, pages)
            case UnmapWeights(model):
                bind = self._bound[model]
                count = -(-bind.spec.manifest.image_bytes // self._device.page_bytes)
                self._weights.unmap(bind.offset_pages, count)
            case LoadWeights():
                self._load(effect)
            case CopyBlocks():
                self._copy(effect)

    def progress(self) -> list[Progress]:
        """What the streams have completed since the last call."""
        events = []
        for name, stream in self._streams.items():
            completed = stream.completed()
            if completed != self._seen[name]:
                self._seen[name] = completed
                events.append(Progress(name, completed))
        return events

    def _load(self, effect: LoadWeights) -> None:
        bind, image = self._bound[effect.model], self._images[effect.model]
        nbytes = bind.spec.manifest.image_bytes
        event = self._streams[StreamName.WEIGHTS].copy([(self.weights_base(bind), image.base, nbytes)])
        assert event == effect.event
        self._submitted[StreamName.WEIGHTS] = event.value

    def _copy(self, effect: CopyBlocks) -> None:
        stream = self._streams[effect.stream]
        if effect.after is not None:
            stream.wait(effect.after)
        device_first = effect.stream is StreamName.SWAP_OUT
        source, target = (self.kv.base, self._host.base) if device_first else (self._host.base, self.kv.base)
        nbytes = effect.shape.block_bytes
        pairs = [(self._offset(block, nbytes), self._offset(to, nbytes)) for block, to in effect.pairs]
        event = stream.copy([(target + to, source + at, nbytes) for at, to in pairs])
        assert event == effect.event
        self._submitted[effect.stream] = event.value

    def _offset(self, block: int, block_bytes: int) -> int:
        slab, index = divmod(block, self._slab_bytes // block_bytes)
        return slab * self._slab_bytes + index * block_bytes
