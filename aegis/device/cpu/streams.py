"""Streams of the CPU device: one thread each, which copies, wipes and waits in the order of submission."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread

from aegis.core.copy_order import NOW
from aegis.core.ids import PageRun
from aegis.core.request import EventHandle
from aegis.device.copy_lanes import CopyLane, Place
from aegis.device.cpu.libc import copy, copy_small
from aegis.device.cpu.pages import WIPE_PAGES, PhysicalPages
from aegis.device.protocol import CopyTimes
from aegis.device.shared_events import SharedWords

_SMALL_BYTES = 128 << 10  # copied in about 10 µs, not worth the interpreter lock changing hands
_CHUNK_BYTES = 32 << 20  # the most that is copied after a copy was abandoned, or while a more urgent one waits
_CLOSING_POLL_NS = 20_000_000
_TOOK_MAX = 10_000  # kept until they are read

_Copies = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class _Wipe:
    runs: tuple[PageRun, ...]


class CpuStream:
    """A `Stream` whose progress is a shared word; the word must be 0 and nobody else's.

    A copy that raises breaks the stream: what follows is not done, its events never pass, and `completed` raises.
    """

    __slots__ = (
        "_abandoned",
        "_closing",
        "_error",
        "_pages",
        "_place",
        "_queue",
        "_submitted",
        "_thread",
        "_took",
        "_words",
        "name",
        "word",
    )

    def __init__(self, name: str, word: int, words: SharedWords, pages: PhysicalPages, lane: CopyLane) -> None:
        assert words.load(word) == 0, f"word {word} was used before"
        self.name = name
        self.word = word
        self._words = words
        self._pages = pages
        self._place = Place(lane)
        self._submitted = 0
        self._abandoned: set[int] = set()
        self._error: Exception | None = None
        self._closing = False
        self._took: deque[CopyTimes] = deque(maxlen=_TOOK_MAX)
        self._queue: SimpleQueue[EventHandle | _Copies | _Wipe | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=f"stream {name}", daemon=True)
        self._thread.start()

    def wait(self, event: EventHandle) -> None:
        self._queue.put(event)

    def copy(self, copies: Sequence[tuple[int, int, int]], *, urgency: int = NOW) -> EventHandle:
        return self._submit(tuple(copies), urgency)

    def wipe(self, runs: Sequence[PageRun]) -> EventHandle:
        self._pages.start_wiping(runs)
        return self._submit(_Wipe(tuple(runs)), NOW)

    def abandon(self, event: EventHandle) -> None:
        assert event.word == self.word, f"{event} is another stream's"
        if self._words.load(self.word) < event.value:
            self._abandoned.add(event.value)

    def completed(self) -> int:
        if self._error is not None:
            raise RuntimeError(f"a copy on stream {self.name} failed: {self._error}") from self._error
        return self._words.load(self.word)

    def took(self) -> list[CopyTimes]:
        return [self._took.popleft() for _ in range(len(self._took))]

    def close(self) -> None:
        """Ends the thread, with the copy in hand cut short and the rest not done. No address is touched afterwards."""
        self._closing = True
        self._queue.put(None)
        self._thread.join()

    def _submit(self, work: _Copies | _Wipe, urgency: int) -> EventHandle:
        self._submitted += 1
        self._place.submitted(urgency)
        self._queue.put(work)
        return EventHandle(self.word, self._submitted)

    def _run(self) -> None:
        value = 0
        try:
            while (work := self._queue.get()) is not None and not self._closing:
                if isinstance(work, EventHandle):
                    self._await(work)
                    continue
                value += 1
                start_ns = time.monotonic_ns()
                try:
                    if isinstance(work, _Wipe):
                        self._wipe(work.runs)
                    elif value not in self._abandoned:
                        self._copy(work, value)
                finally:
                    self._place.end()
                if self._closing:
                    return
                self._took.append(CopyTimes(value, start_ns, time.monotonic_ns()))
                self._words.store(self.word, value)
                self._abandoned.discard(value)
        except Exception as error:  # noqa: BLE001 - whatever a copy raises is for the caller of `completed`
            self._error = error

    def _await(self, event: EventHandle) -> None:
        while not self._words.wait(event.word, event.value, timeout_ns=_CLOSING_POLL_NS):
            if self._closing:
                return

    def _copy(self, copies: _Copies, value: int) -> None:
        def unwanted() -> bool:
            return self._closing or value in self._abandoned

        self._place.begin()
        for destination, source, nbytes in copies:
            assert nbytes >= 0, f"a copy of {nbytes} bytes"
            if nbytes < _SMALL_BYTES:
                self._place.wait(unwanted)
                copy_small(destination, source, nbytes)
                continue
            for at in range(0, nbytes, _CHUNK_BYTES):
                self._place.wait(unwanted)
                if unwanted():
                    return
                copy(destination + at, source + at, min(_CHUNK_BYTES, nbytes - at))

    def _wipe(self, runs: Sequence[PageRun]) -> None:
        for start, stop in runs:
            for page in range(start, stop, WIPE_PAGES):
                if self._closing:
                    return
                self._pages.wipe(page, min(page + WIPE_PAGES, stop))
