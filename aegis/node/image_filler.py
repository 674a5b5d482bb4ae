"""The memory of a machine's model cache: one region per rank for weight images, filled from disk by a few threads.

Instances map a region once, whole, and are told which extents hold which image. Nothing is decided here.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from threading import Lock

from aegis.core.ids import ModelId
from aegis.core.model import IMAGE_EXTENT_BYTES, IMAGE_PIECE_BYTES, ModelSpec
from aegis.device.host_memory import MappedFile, SharedMemory
from aegis.device.image_file import ImageDamaged, ImageFile, ImageNotOpened
from aegis.telemetry.logs import log
from memory.pages import Runs

_logger = logging.getLogger(__name__)

READERS = min(4, len(os.sched_getaffinity(0)))
_NICE = 10  # of the reading threads alone: an instance that needs the image loads it from disk meanwhile
_EXTENTS_PER_PIECE = IMAGE_PIECE_BYTES // IMAGE_EXTENT_BYTES


@dataclass(frozen=True, slots=True)
class Filled:
    """The end of a fill: `whole`, or not, and then perhaps because the image on disk is damaged."""

    whole: bool
    damage: str = ""


class _Region:
    """One rank's memory for images."""

    def __init__(self, nbytes: int) -> None:
        self.memory = SharedMemory.create(nbytes, "images")
        self._mapped = MappedFile(self.memory.path, writable=True, populate=False)
        self.bytes = memoryview((ctypes.c_char * self._mapped.nbytes).from_address(self._mapped.base)).cast("B")

    def close(self) -> None:
        self.bytes.release()
        self._mapped.close()
        self.memory.close()


@dataclass(slots=True, eq=False)
class _Filling:
    """A fill under way; `lanes` threads take pieces in turn."""

    spec: ModelSpec
    extents: Sequence[int]
    ended: asyncio.Future[Filled]
    lanes: int
    left: int  # pieces that have not been read yet
    next_piece: int = 0
    stopped: bool = False
    damage: str = ""
    shortage: str = ""


class ImageFiller:
    """`nbytes` of host memory for weight images, taken from the system as they are filled for the first time: as many
    for each of the `ranks` that share models out, whose images lie in the same extents of their regions."""

    def __init__(self, nbytes: int, *, ranks: int = 1) -> None:
        self.extents = nbytes // IMAGE_EXTENT_BYTES // ranks
        self._regions = [_Region(max(self.extents, 1) * IMAGE_EXTENT_BYTES) for _ in range(ranks)]
        self._fillings: dict[ModelId, _Filling] = {}
        self._taking = Lock()
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="fill", initializer=os.nice, initargs=(_NICE,))
        self._loop = asyncio.get_running_loop()
        self._closed = False

    @property
    def paths(self) -> list[str]:
        """The path of each rank's region, for instances."""
        return [region.memory.path for region in self._regions]

    def fill(self, spec: ModelSpec, runs: Runs) -> asyncio.Future[Filled]:
        """Copies the image from disk into these extents, which no thread touches any more when that is done."""
        pieces = -(-spec.manifest.image_bytes // IMAGE_PIECE_BYTES)
        extents = [extent for run in runs for extent in range(*run)]
        filling = _Filling(spec, extents, self._loop.create_future(), READERS, left=pieces * len(self._regions))
        self._fillings[spec.model] = filling
        for _ in range(filling.lanes):
            self._threads.submit(self._fill, filling)
        return filling.ended

    def abandon(self, model: ModelId) -> None:
        """The rest of the fill under way need not be done."""
        if model in self._fillings:
            self._fillings[model].stopped = True

    def close(self) -> None:
        """Ends the fills. Instances that still map the region keep it until they end."""
        self._closed = True
        for filling in self._fillings.values():
            filling.stopped = True
        self._threads.shutdown(cancel_futures=True)
        for region in self._regions:
            region.close()

    def _ended(self, filling: _Filling) -> None:
        """The filling has ended: called on the loop, once no thread touches the extents any more."""
        del self._fillings[filling.spec.model]
        if filling.left and filling.shortage:  # the model's next use has it tried again
            log(_logger, logging.WARNING, "image is not cached", {"model": filling.spec.model, "why": filling.shortage})
        if not self._closed and not filling.ended.done():
            filling.ended.set_result(Filled(not filling.left, filling.damage))

    # --- threads ------------------------------------------------------------------------------------------------------

    def _fill(self, filling: _Filling) -> None:
        """One lane."""
        try:
            with ExitStack() as opened:
                shards = [filling.spec.shard(rank) for rank in range(len(self._regions))]
                images = [opened.enter_context(closing(ImageFile(s.image_path, s.manifest))) for s in shards]
                for number in self._pieces(filling, images[0].pieces * len(images)):
                    piece, rank = divmod(number, len(images))
                    buffers = self._buffers(filling, self._regions[rank], piece, images[rank].piece_bytes(piece))
                    images[rank].read(piece, buffers)
                    with self._taking:
                        filling.left -= 1
        except ImageNotOpened as shortage:  # other lanes may do without this one
            filling.shortage = str(shortage)
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

    def _buffers(self, filling: _Filling, region: _Region, piece: int, nbytes: int) -> list[memoryview]:
        """The buffers that a piece goes to: one extent after the other."""
        first = piece * _EXTENTS_PER_PIECE
        buffers = []
        for extent in filling.extents[first : first + _EXTENTS_PER_PIECE]:
            at = extent * IMAGE_EXTENT_BYTES
            buffers.append(region.bytes[at : at + min(nbytes, IMAGE_EXTENT_BYTES)])
            nbytes -= len(buffers[-1])
        return buffers
