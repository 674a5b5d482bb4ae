"""Performs on bytes what a ledger has counted: maps pages, loads weights, copies KV blocks, reports progress."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from aegis.core.block_runs import BlockCopy
from aegis.core.copy_order import urgency
from aegis.core.effects import (
    AbandonLoad,
    AcceptPages,
    Bind,
    CopyBlocks,
    LoadWeights,
    MapKv,
    MapWeights,
    MoveBlocks,
    RemoteLoad,
    RevokePages,
    StageImage,
    StreamName,
    Unbind,
    UnmapKv,
    UnmapWeights,
    WipePages,
)
from aegis.core.events import LoadFailed, Progress
from aegis.core.ids import ModelId, PageRun
from aegis.core.model import IMAGE_EXTENT_BYTES
from aegis.core.request import EventHandle
from aegis.device.block_copies import block_copies
from aegis.device.cached_images import CachedImages
from aegis.device.peer_transfers import PeerTransfers
from aegis.device.protocol import Device, HostRegion
from aegis.device.stage_buffer import StageBuffer

MemoryEffect = (
    Bind
    | Unbind
    | MapKv
    | UnmapKv
    | MapWeights
    | UnmapWeights
    | LoadWeights
    | AbandonLoad
    | RemoteLoad
    | StageImage
    | CopyBlocks
    | MoveBlocks
    | AcceptPages
    | WipePages
    | RevokePages
)


class CopyDone(NamedTuple):
    """A copy that has ended; `model` is the model of weights, "" for KV. A copy from disk starts when it is asked
    for."""

    stream: StreamName
    model: ModelId
    start_ns: int
    stop_ns: int
    nbytes: int


class _Copying(NamedTuple):
    value: int
    model: ModelId
    nbytes: int
    requested_ns: int | None = None  # if the stream itself does not copy


_COPIED_MAX = 10_000  # kept until they are read
_KV = ModelId("")


class MemoryExecutor:
    """One instance's memory: a range for weights, one for KV slabs, and its streams. `host` are the node's KV slabs,
    `images` is its model cache; an image that is not there comes from disk through `stage`. If ranks share a model out,
    it loads the part of this `rank`. Without `peers` no load is shared."""

    def __init__(
        self,
        device: Device,
        host: HostRegion,
        images: CachedImages,
        stage: StageBuffer,
        *,
        slab_bytes: int,
        address_pages: int,
        rank: int = 0,
        peers: PeerTransfers | None = None,
    ) -> None:
        self._device = device
        self._peers = peers
        self._host = host
        self._images = images
        self._stage = stage
        self._rank = rank
        self._slab_bytes = slab_bytes
        self._pages_per_slab = slab_bytes // device.page_bytes
        self._weights = device.reserve(address_pages * device.page_bytes)
        slabs = device.page_count // self._pages_per_slab
        self.kv = device.reserve(slabs * slab_bytes)
        self._streams = {name: device.stream(name.value, outwards=name is StreamName.SWAP_OUT) for name in StreamName}
        self._seen = dict.fromkeys(StreamName, 0)
        self._submitted = dict.fromkeys(StreamName, 0)
        self._bound: dict[ModelId, Bind] = {}
        self._staged: dict[EventHandle, ModelId] = {}  # loads through the stage, by their events
        self._copying: dict[StreamName, deque[_Copying]] = {name: deque() for name in StreamName}
        self._copied: deque[CopyDone] = deque(maxlen=_COPIED_MAX)

    @property
    def words(self) -> Mapping[StreamName, int]:
        """The shared word of each stream."""
        return {name: stream.word for name, stream in self._streams.items()}

    @property
    def in_flight(self) -> bool:
        return self._seen != self._submitted

    @property
    def peer_load_bytes(self) -> int:
        """What peers have carried of its loads."""
        return self._peers.loads.carried_bytes if self._peers else 0

    def weights_base(self, bind: Bind) -> int:
        return self._weights.base + bind.offset_pages * self._device.page_bytes

    def perform(self, effect: MemoryEffect) -> None:
        """Maps at once, copies asynchronously. Raises OSError if the system refuses. The `Unbind` of a model that is
        not bound does nothing."""
        match effect:
            case Bind(spec):
                self._bound[spec.model] = effect
            case Unbind(model):
                self._bound.pop(model, None)
            case MapKv(slab, runs):
                self.kv.map(slab * self._pages_per_slab, runs)
            case UnmapKv(slab):
                self.kv.unmap(slab * self._pages_per_slab, self._pages_per_slab)
            case MapWeights(model, runs):
                self._weights.map(self._bound[model].offset_pages, runs)
            case UnmapWeights(model):
                bind = self._bound[model]
                count = -(-bind.spec.manifest.image_bytes // self._device.page_bytes)
                self._weights.unmap(bind.offset_pages, count)
            case LoadWeights():
                self._load(effect)
            case AbandonLoad(event):
                self._abandon(event)
            case RemoteLoad(load, peer, _, address, runs, staged):
                assert self._peers
                self._peers.loads.join(load.value, peer, address, runs, staged)
            case StageImage():
                self._stage_for_peer(effect)
            case CopyBlocks():
                self._copy(effect)
            case MoveBlocks(shape, copies):
                self._device.move(self._copies(copies, shape.block_bytes, self.kv.base, self.kv.base))
            case AcceptPages(runs):
                self._device.grant(runs)
            case WipePages(runs, event):
                self._started(StreamName.SCRUB, self._streams[StreamName.SCRUB].wipe(runs), event)
            case RevokePages(runs):
                self._device.revoke(runs)

    def progress(self) -> list[Progress | LoadFailed]:
        """Completions on all streams since the last call. A load's failure comes before its completion."""
        events: list[Progress | LoadFailed] = []
        for name, stream in self._streams.items():
            completed = stream.completed()
            if completed != self._seen[name]:
                self._seen[name] = completed
                self._time(name)
                if name is StreamName.RELAY and self._peers:
                    self._peers.relay.unmap()
                events.append(Progress(name, completed))
        self._forget_staged()
        if self._peers:
            self._peers.loads.settle()
        return [*self._stage.failures(), *events]

    def copied(self) -> list[CopyDone]:
        """Copies that were seen to have ended since the last call."""
        copied = list(self._copied)
        self._copied.clear()
        return copied

    def _time(self, name: StreamName) -> None:
        copying = self._copying[name]
        for took in self._streams[name].took():
            while copying and copying[0].value < took.value:
                copying.popleft()
            if copying and copying[0].value == took.value:
                _, model, nbytes, requested_ns = copying.popleft()
                self._copied.append(CopyDone(name, model, requested_ns or took.start_ns, took.stop_ns, nbytes))

    def _started(self, name: StreamName, event: EventHandle, expected: EventHandle) -> None:
        assert event == expected
        self._submitted[name] = event.value

    def _load(self, effect: LoadWeights) -> None:
        bind, stream = self._bound[effect.model], self._streams[effect.stream]
        base, nbytes = self.weights_base(bind), bind.spec.manifest.image_bytes
        if effect.cached and effect.shared and self._images.base is not None:
            assert self._peers
            requested_ns = time.monotonic_ns()
            image = list(_parts(effect.cached, self._images.base, nbytes))
            stream.wait(self._peers.loads.load(effect.event.value, image, base))
            event = stream.copy(())
        elif effect.cached and self._images.base is not None:
            copies = list(_copies(effect.cached, self._images.base, base, nbytes))
            event, requested_ns = stream.copy(copies, urgency=urgency(effect.stream)), None
        else:
            requested_ns = time.monotonic_ns()
            stream.wait(self._stage.load(bind.spec.shard(self._rank), base, urgency=urgency(effect.stream)))
            event = stream.copy(())
            self._staged[event] = effect.model
        self._copying[effect.stream].append(_Copying(event.value, effect.model, nbytes, requested_ns))
        self._started(effect.stream, event, effect.event)

    def _stage_for_peer(self, effect: StageImage) -> None:
        assert self._peers
        base, stream = self._images.base, self._streams[StreamName.RELAY]
        image = [] if base is None else list(_parts(effect.cached, base, effect.nbytes))
        stream.wait(self._peers.relay.stage(effect.event.value, effect.load.value, image, effect.requests, effect.runs))
        self._started(StreamName.RELAY, stream.copy(()), effect.event)

    def _abandon(self, event: EventHandle) -> None:
        if self._peers and event.word == self._streams[StreamName.WEIGHTS].word:
            self._peers.loads.abandon(event.value)
        if event in self._staged:
            self._stage.abandon(self._staged[event])
        name = next(name for name, stream in self._streams.items() if stream.word == event.word)
        self._streams[name].abandon(event)
        kept = [copying for copying in self._copying[name] if copying.value != event.value]
        self._copying[name] = deque(kept)  # how much of it was copied is not known

    def _forget_staged(self) -> None:
        for event in [event for event in self._staged if self._device.passed(event)]:
            del self._staged[event]

    def _copy(self, effect: CopyBlocks) -> None:
        stream = self._streams[effect.stream]
        if effect.after is not None:
            stream.wait(effect.after)
        device_first = effect.stream is StreamName.SWAP_OUT
        source, target = (self.kv.base, self._host.base) if device_first else (self._host.base, self.kv.base)
        copies = self._copies(effect.copies, effect.shape.block_bytes, source, target)
        event = stream.copy(copies, urgency=urgency(effect.stream, ahead=effect.ahead))
        nbytes = effect.shape.block_bytes * sum([count for _, _, count in effect.copies])
        self._copying[effect.stream].append(_Copying(event.value, _KV, nbytes))
        self._started(effect.stream, event, effect.event)

    def _copies(
        self, copies: Sequence[BlockCopy], block_bytes: int, source: int, target: int
    ) -> Sequence[tuple[int, int, int]]:
        return block_copies(copies, slab_bytes=self._slab_bytes, block_bytes=block_bytes, source=source, target=target)


def _copies(extents: Sequence[PageRun], source: int, target: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """An image of `nbytes` that lies in these extents, copied to where it is contiguous."""
    for offset, address, count in _parts(extents, source, nbytes):
        yield target + offset, address, count


def _parts(extents: Sequence[PageRun], source: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """The parts of an image of `nbytes` that lies in these extents, as `(offset in it, address, nbytes)`."""
    offset = 0
    for start, stop in extents:
        count = min((stop - start) * IMAGE_EXTENT_BYTES, nbytes - offset)
        yield offset, source + start * IMAGE_EXTENT_BYTES, count
        offset += count
    assert offset == nbytes, f"{nbytes - offset} bytes of the image are not in its extents"
