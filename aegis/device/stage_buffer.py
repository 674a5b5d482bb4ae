"""The stage buffer of a device: images that are not in the node's model cache come from disk through it (Aegaeon §5.2).

A ring of chunks in host memory, page-locked where the device wants it. Several threads read an image's pieces into it,
each as soon as its chunk is free; a stream of the stage's own copies them to the device in order. Two counts tie the
two together, both of chunks since the start: the readers' word says how many have been read, the stream's word how
many have been copied. Chunk n is copied once n + 1 have been read, and read once n + 1 - ring have been copied. All
work of the device is submitted by the caller's thread; the readers only read.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread

from aegis.core.copy_order import NOW
from aegis.core.events import LoadFailed
from aegis.core.ids import ModelId
from aegis.core.model import IMAGE_PIECE_BYTES, ModelSpec
from aegis.core.request import EventHandle
from aegis.device.host_memory import SharedMemory
from aegis.device.image_file import ImageDamaged, ImageFile, ImageNotOpened
from aegis.device.protocol import Device
from aegis.device.shared_events import SharedWords

STAGE_WORDS = 2
"""Shared words that a stage needs: its stream's and its readers'."""

CHUNKS = 4
READERS = min(4, len(os.sched_getaffinity(0)))
_CLOSING_POLL_NS = 20_000_000
_OPENED_AGAIN_S = 0.1

_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Load:
    spec: ModelSpec
    first: int  # its first chunk
    pieces: int
    left: int  # pieces that are not read yet
    wanted: bool = True
    waits: bool = False  # for what opening its file takes
    file: ImageFile | None = None
    opening: Lock = field(default_factory=Lock)

    def open(self) -> ImageFile:
        with self.opening:
            if self.file is None:
                self.file = ImageFile(self.spec.image_path, self.spec.manifest)
            return self.file


class StageBuffer:
    """Loads images from disk, one after the other. `word` is a shared word for the readers alone, still 0."""

    def __init__(
        self, device: Device, words: SharedWords, word: int, *, chunks: int = CHUNKS, readers: int = READERS
    ) -> None:
        self._device = device
        self._words = words
        self._word = word
        self._chunks = chunks
        self._memory = SharedMemory.create(chunks * IMAGE_PIECE_BYTES, "stage")
        self._region = device.open_host(self._memory.path, writable=True)
        self._ring = memoryview((ctypes.c_char * self._region.nbytes).from_address(self._region.base)).cast("B")
        self._stream = device.stream("stage")
        self._submitted = 0
        self._loads: dict[ModelId, _Load] = {}  # those that may not be copied whole
        self._failures: SimpleQueue[LoadFailed] = SimpleQueue()
        self._tasks: SimpleQueue[tuple[_Load, int] | None] = SimpleQueue()
        self._booking = Lock()
        self._read: set[int] = set()  # chunks beyond the first that is missing
        self._read_count = 0
        self._closing = False
        self._readers = [Thread(target=self._run, name=f"stage {i}", daemon=True) for i in range(readers)]
        for reader in self._readers:
            reader.start()

    def load(self, spec: ModelSpec, target: int, *, urgency: int = NOW) -> EventHandle:
        """Copies the model's image to the address `target` on the device. The event passes whatever happens; `failures`
        reports errors before it."""
        nbytes = spec.manifest.image_bytes
        pieces = -(-nbytes // IMAGE_PIECE_BYTES)
        done = self._stream.completed()
        self._loads = {model: load for model, load in self._loads.items() if load.first + load.pieces > done}
        load = self._loads[spec.model] = _Load(spec, self._submitted, pieces, left=pieces)
        event = EventHandle(self._stream.word, self._submitted)
        for piece in range(pieces):
            at, chunk = piece * IMAGE_PIECE_BYTES, self._submitted
            self._submitted += 1
            self._stream.wait(EventHandle(self._word, self._submitted))
            source = self._region.base + self._slot(chunk)
            event = self._stream.copy([(target + at, source, min(IMAGE_PIECE_BYTES, nbytes - at))], urgency=urgency)
            assert event.value == self._submitted
            self._tasks.put((load, piece))
        return event

    def abandon(self, model: ModelId) -> None:
        """The rest of the model's load need not be done; its event passes all the same, and soon."""
        load = self._loads.pop(model, None)
        if load is None:
            return
        with self._booking:
            load.wanted = False
        for chunk in range(max(load.first, self._stream.completed()), load.first + load.pieces):
            self._stream.abandon(EventHandle(self._stream.word, chunk + 1))

    def failures(self) -> list[LoadFailed]:
        """Loads that failed since the last call."""
        return [self._failures.get() for _ in range(self._failures.qsize())]

    def close(self) -> None:
        """Ends the readers; before the device is closed."""
        self._closing = True
        for _ in self._readers:
            self._tasks.put(None)
        for reader in self._readers:
            reader.join()
        self._ring.release()
        self._memory.close()

    # --- readers ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None and not self._closing:
            load, piece = task
            if load.wanted:
                self._read_piece(load, piece)
            self._done(load, load.first + piece)

    def _read_piece(self, load: _Load, piece: int) -> None:
        chunk = load.first + piece
        free = EventHandle(self._stream.word, chunk + 1 - self._chunks)
        while not self._device.wait(free, timeout_ns=_CLOSING_POLL_NS):
            if self._closing or not load.wanted:
                return
        try:
            image, at = self._opened(load), self._slot(chunk)
            if image is None:
                return
            image.read(piece, [self._ring[at : at + image.piece_bytes(piece)]])
        except ImageDamaged as error:
            self._fail(load, str(error))

    def _opened(self, load: _Load) -> ImageFile | None:
        """None if it is not wanted any more. What the system lacks, others may give back: the image is right. Raises
        ImageDamaged."""
        while load.wanted and not self._closing:
            try:
                return load.open()
            except ImageNotOpened as shortage:
                with self._booking:
                    told, load.waits = load.waits, True
                if not told:
                    _logger.warning("%s waits to be loaded: %s", load.spec.model, shortage)
                time.sleep(_OPENED_AGAIN_S)
        return None

    def _fail(self, load: _Load, reason: str) -> None:
        with self._booking:
            if load.wanted:
                load.wanted = False
                self._failures.put(LoadFailed(load.spec.model, reason))

    def _done(self, load: _Load, chunk: int) -> None:
        with self._booking:
            load.left -= 1
            if not load.left and load.file is not None:
                load.file.close()
            self._read.add(chunk)
            while self._read_count in self._read:
                self._read.remove(self._read_count)
                self._read_count += 1
            self._words.store(self._word, self._read_count)

    def _slot(self, chunk: int) -> int:
        return chunk % self._chunks * IMAGE_PIECE_BYTES
