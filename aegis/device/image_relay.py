"""Pieces of images on their way to another device: the first hop, from the host to staging pages of this one.

Another instance's load asks for one piece after the other (`aegis.device.shared_loads`), in words of its own, one for
each place in the staging pages. A thread copies each to its place on a stream that yields to everything else of this
process; the progress of that stream is the event that the second hop waits for. It asks for a place again only when it
has taken the last piece away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

from aegis.core.copy_order import FOR_PEERS
from aegis.core.ids import PageRun
from aegis.core.model import PIECE_BYTES, PLACES, STAGING_BYTES
from aegis.core.request import EventHandle
from aegis.device.piece_requests import over, piece_of, request_of
from aegis.device.protocol import Device
from aegis.device.shared_events import SharedWords

_CLOSING_POLL_NS = 20_000_000

Copy = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class _Carried:
    number: int
    load: int
    image: Sequence[Copy]  # the parts of the image: offset in it, address, bytes
    requests: Sequence[int]


class ImageRelay:
    """Stages for one load at a time. `word` is a shared word for this object alone, still 0."""

    def __init__(self, device: Device, words: SharedWords, word: int) -> None:
        self._device = device
        self._words = words
        self._word = word
        self._stream = device.stream("relay pieces")
        self._range = device.reserve(STAGING_BYTES)
        self._mapped = 0  # pages
        self._closing = False
        self._queue: SimpleQueue[_Carried | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="image relay", daemon=True)
        self._thread.start()

    @property
    def staged(self) -> int:
        """The word whose progress counts what was staged."""
        return self._stream.word

    def stage(
        self, number: int, load: int, image: Sequence[Copy], requests: Sequence[int], runs: Sequence[PageRun]
    ) -> EventHandle:
        """Stages, as job `number`, what the load asks for in `requests`, in these pages; nothing of an image without
        parts. The event passes when it wants no more; `unmap` then."""
        self._range.map(0, runs)
        self._mapped = sum([run.pages for run in runs])
        self._queue.put(_Carried(number, load, image, requests))
        return EventHandle(self._word, number)

    def unmap(self) -> None:
        """The job is over: its pages are in no range any more."""
        if self._mapped:
            self._range.unmap(0, self._mapped)
            self._mapped = 0

    def close(self) -> None:
        """Ends the thread; before the device is closed."""
        self._closing = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None and not self._closing:
            event, count = EventHandle(self._stream.word, 0), 0
            if not job.image:
                event = EventHandle(job.requests[0], over(job.load))
            while job.image and (piece := self._next(job, count)) is not None:
                place = self._range.base + count % PLACES * PIECE_BYTES
                event = self._stream.copy(piece_copies(job.image, piece, place), urgency=FOR_PEERS)
                count += 1
            if not self._wait(event):
                return
            self._words.store(self._word, job.number)

    def _next(self, job: _Carried, count: int) -> int | None:
        """The piece that is asked for next; None: no more."""
        word = job.requests[count % PLACES]
        if not self._wait(EventHandle(word, request_of(job.load, count))):
            return None
        return piece_of(self._words.load(word), job.load)

    def _wait(self, event: EventHandle) -> bool:
        """False if the instance is closing."""
        while not self._device.wait(event, timeout_ns=_CLOSING_POLL_NS):
            if self._closing:
                return False
        return True


def piece_copies(image: Sequence[Copy], piece: int, target: int) -> list[Copy]:
    """`(destination, source, nbytes)` that bring a piece of the image to `target`. `image`: its parts as `(offset,
    address, nbytes)`, in order."""
    start, stop = piece * PIECE_BYTES, (piece + 1) * PIECE_BYTES
    copies = []
    for offset, address, nbytes in image:
        first, last = max(start, offset), min(stop, offset + nbytes)
        if first < last:
            copies.append((target + first - start, address + first - offset, last - first))
    return copies
