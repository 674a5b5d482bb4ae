"""Streams of the CUDA device: a CUDA stream each, and a thread that feeds it in the order of submission.

Written from the documentation of CUDA 13; not run on a GPU. The thread keeps the caller free of the driver, which may
block when its queues are full or memory is not page-locked. It gives the GPU no more than a few chunks ahead, so that
what is abandoned need not run to its end, and it is what waits for events of other processes: were the GPU itself to
wait for a word (cuStreamWaitValue64), its scheduler, which cannot see what that wait depends on, might put it before
the very work it waits for. Between two chunks the thread lets more urgent copies of other streams pass: priorities of
CUDA streams are for kernels, copies know none. Progress the GPU writes itself (cuStreamWriteValue64), as a copy ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any

from aegis.core.copy_order import NOW
from aegis.core.ids import PageRun
from aegis.core.request import EventHandle
from aegis.device.copy_lanes import CopyLane, Place
from aegis.device.cuda.driver import Context, CudaError, Driver
from aegis.device.cuda.memory_mapping import CudaRange, GrantedPages
from aegis.device.protocol import CopyTimes
from aegis.device.shared_events import WORD_BYTES, SharedWords

CHUNK_BYTES = 32 << 20
"""A long copy is submitted in such pieces; 0.6 ms each at 50 GB/s."""

CHUNKS_AHEAD = 4
_BEGAN_MAX = 10_000  # kept until they are read

POLL_NS = 50_000
"""The interval between looks at a word of another process: its GPU writes it but wakes no thread."""

_CLOSING_POLL_S = 0.02


class WordsOnGpu:
    """The node's shared words, page-locked and with an address that the GPU can write to."""

    def __init__(self, driver: Driver, words: SharedWords) -> None:
        self.words = words
        self._driver = driver
        flags = driver.api.CU_MEMHOSTREGISTER_DEVICEMAP | driver.api.CU_MEMHOSTREGISTER_PORTABLE
        driver("cuMemHostRegister", words.base, words.count * WORD_BYTES, flags)
        self._address = int(driver("cuMemHostGetDevicePointer", words.base, 0))

    def address(self, word: int) -> int:
        """The address at which the GPU sees it."""
        return self._address + word * WORD_BYTES

    def close(self) -> None:
        self._driver("cuMemHostUnregister", self.words.base)


class CudaStream:
    """A `Stream`. `siblings` are all streams of this process, by word; `scratch` has a place for every page."""

    def __init__(
        self,
        name: str,
        word: int,
        driver: Driver,
        context: Context,
        words: WordsOnGpu,
        siblings: dict[int, CudaStream],
        pages: GrantedPages,
        scratch: CudaRange,
        lane: CopyLane,
    ) -> None:
        assert words.words.load(word) == 0, f"word {word} was used before"
        self.name = name
        self.word = word
        self._driver = driver
        self._context = context
        self._words = words
        self._siblings = siblings
        self._pages = pages
        self._scratch = scratch
        self._place = Place(lane)
        self._handle = driver("cuStreamCreate", driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._submitted = 0
        self._abandoned: set[int] = set()
        self._error: Exception | None = None
        self._closing = False
        self._began: deque[tuple[int, int]] = deque(maxlen=_BEGAN_MAX)  # values, and when
        self._given = Condition()
        self._events: dict[int, Any] = {}  # by value, oldest first, of what the GPU was given and may not have done
        self._last_given = 0
        self._ahead: deque[Any] = deque()  # events after each of the last chunks
        self._unmarked_bytes = 0
        self._spare: list[Any] = []
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=f"stream {name}", daemon=True)
        self._thread.start()

    # --- the caller's side

    def wait(self, event: EventHandle) -> None:
        self._queue.put(partial(self._await, event))

    def copy(self, copies: Sequence[tuple[int, int, int]], *, urgency: int = NOW) -> EventHandle:
        self._submitted += 1
        self._place.submitted(urgency)
        self._queue.put(partial(self._copy, self._submitted, tuple(copies)))
        return EventHandle(self.word, self._submitted)

    def wipe(self, runs: Sequence[PageRun]) -> EventHandle:
        self._pages.start_wiping(runs)
        self._submitted += 1
        self._place.submitted(NOW)
        self._queue.put(partial(self._wipe, self._submitted, tuple(runs)))
        return EventHandle(self.word, self._submitted)

    def abandon(self, event: EventHandle) -> None:
        """A few chunks may still be copied before the event passes."""
        assert event.word == self.word
        with self._given:
            if event.value > self._last_given:
                self._abandoned.add(event.value)

    def completed(self) -> int:
        if self._error is None:
            code = self._driver.api.cuStreamQuery(self._handle)[0]
            results = self._driver.api.CUresult
            if code not in (results.CUDA_SUCCESS, results.CUDA_ERROR_NOT_READY):
                self._error = CudaError(code.name)
        if self._error is not None:
            raise RuntimeError(f"a copy on stream {self.name} failed: {self._error}") from self._error
        return self._words.words.load(self.word)

    def took(self) -> list[CopyTimes]:
        """The times of copies that have ended since the last call. A copy counts as ended when it is seen to have."""
        done, now_ns, taken = self._words.words.load(self.word), time.monotonic_ns(), list[CopyTimes]()
        while self._began and self._began[0][0] <= done:
            taken.append(CopyTimes(*self._began.popleft(), now_ns))
        return taken

    def end(self) -> None:
        """Ends the thread, with the copy in hand cut short and the rest not done."""
        self._closing = True
        self._queue.put(None)
        self._thread.join()

    def close(self) -> None:
        """Waits for what the GPU was given. All streams of the process must have ended."""
        self._driver("cuStreamSynchronize", self._handle)
        for event in (*self._events.values(), *self._ahead, *self._spare):
            self._driver("cuEventDestroy", event)
        self._driver("cuStreamDestroy", self._handle)

    # --- the thread's side

    def _run(self) -> None:
        try:
            self._context.enter()
            while (work := self._queue.get()) is not None and not self._closing:
                work()
        except Exception as error:  # noqa: BLE001 - whatever a copy raises is for the caller of `completed`
            self._error = error

    def _await(self, event: EventHandle) -> None:
        source = self._siblings.get(event.word)
        if source is not None:
            source.precede(self._handle, event.value, self._is_closing)
            return
        while not self._words.words.wait(event.word, event.value, timeout_ns=POLL_NS) and not self._closing:
            pass

    def precede(self, other: Any, value: int, gave_up: Callable[[], bool]) -> None:
        """Has another CUDA stream wait for a copy of this one, once the GPU was given it. From the other's thread."""
        with self._given:  # lest the event is recorded anew meanwhile
            while self._last_given < value and not gave_up():
                self._given.wait(_CLOSING_POLL_S)
            if value in self._events:
                self._driver("cuStreamWaitEvent", other, self._events[value], 0)

    def _copy(self, value: int, copies: tuple[tuple[int, int, int], ...]) -> None:
        self._began.append((value, time.monotonic_ns()))
        self._place.begin()
        try:
            self._feed(value, copies)
        finally:
            self._place.end()
        self._finish(value)

    def _feed(self, value: int, copies: tuple[tuple[int, int, int], ...]) -> None:
        def unwanted() -> bool:
            return self._closing or value in self._abandoned

        for destination, source, nbytes in copies:
            assert nbytes >= 0, f"a copy of {nbytes} bytes"
            for at in range(0, nbytes, CHUNK_BYTES):
                self._place.wait(unwanted)
                if unwanted():
                    break
                count = min(CHUNK_BYTES, nbytes - at)
                self._driver("cuMemcpyAsync", destination + at, source + at, count, self._handle)
                self._pace(count)

    def _wipe(self, value: int, runs: tuple[PageRun, ...]) -> None:
        """The scratch range has a place for every page, so that runs stay runs and no two wipes collide. The pages have
        left it when the event passes."""
        size = self._scratch.page_bytes
        for run in runs:
            self._scratch.back(run.start, [run])
            address, nbytes = self._scratch.base + run.start * size, (run.stop - run.start) * size
            self._driver("cuMemsetD8Async", address, 0, nbytes, self._handle)
        event = self._mark()
        self._driver("cuEventSynchronize", event)
        self._spare.append(event)
        for run in runs:
            self._scratch.bare(run.start, run.stop - run.start)
        self._pages.end_wiping(runs)
        self._place.end()
        self._finish(value)

    def _finish(self, value: int) -> None:
        if self._closing:  # cut short, perhaps
            return
        event = self._mark()
        with self._given:
            done = self._words.words.load(self.word)
            for old in [old for old in self._events if old <= done]:
                self._spare.append(self._events.pop(old))
            self._events[value] = event
            self._last_given = value
            self._abandoned.discard(value)
            self._given.notify_all()
        # Without a flag the write is a barrier: the whole system sees the copies before it.
        self._driver("cuStreamWriteValue64", self._handle, self._words.address(self.word), value, 0)

    def _pace(self, nbytes: int) -> None:
        """Waits until no more than `CHUNKS_AHEAD` chunks lie before the GPU."""
        self._unmarked_bytes += nbytes
        if self._unmarked_bytes < CHUNK_BYTES:
            return
        self._unmarked_bytes = 0
        self._ahead.append(self._mark())
        if len(self._ahead) > CHUNKS_AHEAD:
            oldest = self._ahead.popleft()
            self._driver("cuEventSynchronize", oldest)
            self._spare.append(oldest)

    def _mark(self) -> Any:
        """An event recorded here. One that is recorded anew keeps its meaning for those told to wait before."""
        flags = self._driver.api.CUevent_flags
        kind = flags.CU_EVENT_DISABLE_TIMING | flags.CU_EVENT_BLOCKING_SYNC
        event = self._spare.pop() if self._spare else self._driver("cuEventCreate", kind)
        self._driver("cuEventRecord", event, self._handle)
        return event

    def _is_closing(self) -> bool:
        return self._closing
