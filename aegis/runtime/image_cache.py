"""The node's model cache at work: one region of shared memory for weight images, filled from disk beside serving.

`memory.images` decides; here its decisions are done. All methods are called on the event loop; files are read by a few
threads, which report on the loop. Instances map the region once, whole; which extents hold what they are told.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from threading import Lock
from typing import Protocol

from aegis.core.ids import InstanceId, ModelId
from aegis.core.messages import ToInstance
from aegis.core.model import IMAGE_EXTENT_BYTES, IMAGE_PIECE_BYTES, ModelSpec
from aegis.device.host_memory import MappedFile, SharedMemory
from aegis.device.image_file import ImageDamaged, ImageFile
from memory.images import AbandonFill, CacheEffect, Counters, Fill, Forgotten, ImageUse, ModelCache, State, Tell
from memory.pages import NoPages

READERS = min(4, len(os.sched_getaffinity(0)))
_NICE = 10  # of the reading threads alone: whoever waits for the image loads it from disk meanwhile
_EXTENTS_PER_PIECE = IMAGE_PIECE_BYTES // IMAGE_EXTENT_BYTES


class Wire(Protocol):
    """The node, as the cache needs it."""

    def post(self, instance: InstanceId, message: ToInstance) -> None: ...

    def image_forgotten(self, model: ModelId) -> None:
        """No instance loads from the image of a dropped model any more."""
        ...

    def image_damaged(self, model: ModelId, reason: str) -> None:
        """The image on disk is not what it should be."""
        ...


@dataclass(slots=True, eq=False)
class _Filling:
    """A fill under way; `lanes` threads take pieces in turn."""

    spec: ModelSpec
    extents: Sequence[int]
    lanes: int
    left: int  # pieces that are not read yet
    next_piece: int = 0
    stopped: bool = False
    damage: str = ""


class ImageCache:
    """`nbytes` of host memory for weight images, taken from the system as they are filled for the first time."""

    def __init__(self, nbytes: int, *, check_laws: bool = False) -> None:
        extents = nbytes // IMAGE_EXTENT_BYTES
        self.wire: Wire | None = None
        self._check_laws = check_laws
        self._books = ModelCache(extents)
        self._memory = SharedMemory.create(max(extents, 1) * IMAGE_EXTENT_BYTES, "images")
        self._region = MappedFile(self._memory.path, writable=True, populate=False)
        self._bytes = memoryview((ctypes.c_char * self._region.nbytes).from_address(self._region.base)).cast("B")
        self._specs: dict[ModelId, ModelSpec] = {}
        self._fillings: dict[ModelId, _Filling] = {}
        self._taking = Lock()
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="fill", initializer=os.nice, initargs=(_NICE,))
        self._loop = asyncio.get_running_loop()
        self._closed = False

    @property
    def path(self) -> str:
        """Of the region, for instances."""
        return self._memory.path

    @property
    def counters(self) -> Counters:
        return self._books.counters

    def accounts(self) -> dict[str, int]:
        """Extents by what they hold."""
        return self._books.accounts()

    def images(self) -> dict[ModelId, ImageUse]:
        return self._books.images()

    def state(self, model: ModelId) -> State:
        return self._books.state(model)

    def add(self, spec: ModelSpec, *, pinned: bool) -> bool:
        """False, and nothing is added, where it is to be pinned and the pinned images would not fit."""
        effects = self._books.add(spec.model, -(-spec.manifest.image_bytes // IMAGE_EXTENT_BYTES), pinned=pinned)
        if isinstance(effects, NoPages):
            return False
        self._specs[spec.model] = spec
        self._perform(effects)
        return True

    def pin(self, model: ModelId) -> bool:
        """False, and nothing is changed, where the pinned images would not fit. It must not be evicting."""
        effects = self._books.pin(model)
        if isinstance(effects, NoPages):
            return False
        self._perform(effects)
        return True

    def unpin(self, model: ModelId) -> None:
        self._books.unpin(model)

    def drop(self, model: ModelId) -> None:
        """`image_forgotten` follows."""
        self._perform(self._books.drop(model))

    def use(self, model: ModelId, now_ns: int) -> None:
        """A request for the model came."""
        self._perform(self._books.use(model, now_ns))

    def join(self, instance: InstanceId) -> None:
        self._perform(self._books.join(instance))

    def lost(self, instance: InstanceId) -> None:
        self._perform(self._books.lost(instance))

    def evicted(self, model: ModelId, instance: InstanceId) -> None:
        self._perform(self._books.evicted(model, instance))

    def close(self) -> None:
        """Ends the fills. Instances that still map the region keep it until they end."""
        self._closed = True
        for filling in self._fillings.values():
            filling.stopped = True
        self._threads.shutdown(cancel_futures=True)
        self._bytes.release()
        self._region.close()
        self._memory.close()

    # ------------------------------------------------------------------------------------------------------------------

    def _perform(self, effects: Sequence[CacheEffect]) -> None:
        assert self.wire is not None
        for effect in effects:
            match effect:
                case Fill(model, extents):
                    self._start(model, [extent for run in extents for extent in range(*run)])
                case AbandonFill(model):
                    self._fillings[model].stopped = True
                case Tell(instance, message):
                    self.wire.post(instance, message)
                case Forgotten(model):
                    del self._specs[model]
                    self.wire.image_forgotten(model)
        if self._check_laws:
            self._books.check()

    def _start(self, model: ModelId, extents: Sequence[int]) -> None:
        spec = self._specs[model]
        pieces = -(-spec.manifest.image_bytes // IMAGE_PIECE_BYTES)
        filling = self._fillings[model] = _Filling(spec, extents, READERS, left=pieces)
        for _ in range(filling.lanes):
            self._threads.submit(self._fill, filling)

    def _ended(self, filling: _Filling) -> None:
        """On the loop, once no thread touches the extents any more."""
        if self._closed:
            return
        model = filling.spec.model
        del self._fillings[model]
        self._perform(self._books.unfillable(model) if filling.left else self._books.filled(model))
        if filling.damage and self.wire:
            self.wire.image_damaged(model, filling.damage)

    # --- threads ------------------------------------------------------------------------------------------------------

    def _fill(self, filling: _Filling) -> None:
        """One lane."""
        try:
            with closing(ImageFile(filling.spec.image_path, filling.spec.manifest)) as image:
                for piece in self._pieces(filling, image.pieces):
                    image.read(piece, self._buffers(filling, piece, image.piece_bytes(piece)))
                    with self._taking:
                        filling.left -= 1
        except ImageDamaged as damage:
            filling.damage, filling.stopped = str(damage), True
        finally:
            with self._taking:
                filling.lanes -= 1
                last = not filling.lanes
            if last:
                self._loop.call_soon_threadsafe(self._ended, filling)

    def _pieces(self, filling: _Filling, count: int) -> Iterator[int]:
        while not filling.stopped:
            with self._taking:
                piece = filling.next_piece
                filling.next_piece += 1
            if piece >= count:
                return
            yield piece

    def _buffers(self, filling: _Filling, piece: int, nbytes: int) -> list[memoryview]:
        """Where a piece goes: one extent after the other."""
        first = piece * _EXTENTS_PER_PIECE
        buffers = []
        for extent in filling.extents[first : first + _EXTENTS_PER_PIECE]:
            at = extent * IMAGE_EXTENT_BYTES
            buffers.append(self._bytes[at : at + min(nbytes, IMAGE_EXTENT_BYTES)])
            nbytes -= len(buffers[-1])
        return buffers
