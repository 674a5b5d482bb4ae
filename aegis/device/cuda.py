"""The CUDA device, over the driver API. Not yet run on a GPU: written from the documentation of CUDA 13.

Virtual ranges are cuMemAddressReserve with one cuMemCreate handle per page, made once and recycled. Progress words are
the node's shared words, registered with the driver: a stream writes its word itself (cuStreamWriteValue64) and waits
for another process's word itself (cuStreamWaitValue64), so an `EventHandle` means the same on every device. Waits for
streams of this process use CUDA events instead, because the driver has to see those dependencies to schedule them.

All calls come from the thread that made the device, which holds the context, but `open_host`, which may come from any.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from aegis.core.errors import UserError
from aegis.core.ids import PageId
from aegis.core.request import EventHandle
from aegis.device.host_memory import MappedFile
from aegis.device.shared_words import WORD_BYTES, SharedWords

_POLL_NS = 50_000  # the GPU writes words but wakes nobody


class CudaError(RuntimeError):
    """A driver call that failed; the message names both."""


class Driver:
    """`cuda.bindings.driver` by the names of its calls, with error codes raised as `CudaError`."""

    def __init__(self) -> None:
        try:
            self.api: Any = import_module("cuda.bindings.driver")
        except ImportError as error:
            raise UserError("the cuda device needs a Python package: pip install cuda-bindings") from error

    def __call__(self, name: str, *arguments: Any) -> Any:
        code, *values = getattr(self.api, name)(*arguments)
        if code != self.api.CUresult.CUDA_SUCCESS:
            raise CudaError(f"{name}: {code.name}")
        return values[0] if values else None


class CudaRange:
    """A `VirtualRange` on the GPU. Work that touches a page must have completed before the page is unmapped."""

    def __init__(self, driver: Driver, pages: CudaPages, nbytes: int) -> None:
        self.nbytes = -(-nbytes // pages.page_bytes) * pages.page_bytes
        self._driver = driver
        self._pages = pages
        self._mapped: set[int] = set()  # offsets in pages
        self.base = int(driver("cuMemAddressReserve", self.nbytes, pages.page_bytes, 0, 0))

    def map(self, offset_pages: int, pages: Sequence[PageId]) -> None:
        offsets = range(offset_pages, offset_pages + len(pages))
        assert self._mapped.isdisjoint(offsets), "there are pages mapped already"
        size = self._pages.page_bytes
        for offset, page in zip(offsets, pages, strict=True):
            self._driver("cuMemMap", self.base + offset * size, size, 0, self._pages.handles[page], 0)
            self._mapped.add(offset)
        access = self._pages.access
        self._driver("cuMemSetAccess", self.base + offset_pages * size, len(pages) * size, [access], 1)

    def unmap(self, offset_pages: int, count: int) -> None:
        offsets = range(offset_pages, offset_pages + count)
        assert self._mapped.issuperset(offsets), "there are pages not mapped"
        size = self._pages.page_bytes
        self._driver("cuMemUnmap", self.base + offset_pages * size, count * size)
        self._mapped.difference_update(offsets)

    def close(self) -> None:
        """Unmaps what is mapped and gives the addresses back; a second call does nothing."""
        if self.base:
            for offset in sorted(self._mapped):
                self.unmap(offset, 1)
            self._driver("cuMemAddressFree", self.base, self.nbytes)
            self.base = 0


class CudaPages:
    """The device's physical memory: one handle per page, made at start so that memory cannot run out later."""

    def __init__(self, driver: Driver, memory_bytes: int, ordinal: int) -> None:
        api = driver.api
        self._driver = driver
        prop = api.CUmemAllocationProp()
        prop.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = ordinal
        self.access = api.CUmemAccessDesc()
        self.access.location = prop.location
        self.access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.page_bytes = int(driver("cuMemGetAllocationGranularity", prop, minimum))
        self.handles: list[Any] = []
        try:
            for _ in range(memory_bytes // self.page_bytes):
                self.handles.append(driver("cuMemCreate", self.page_bytes, prop, 0))
        except CudaError as error:
            got = len(self.handles) * self.page_bytes
            self.close()
            raise UserError(
                f"the GPU has {got} bytes free, not the {memory_bytes} of device memory asked for"
            ) from error

    def close(self) -> None:
        while self.handles:
            self._driver("cuMemRelease", self.handles.pop())


class CudaStream:
    """A `Stream`: a CUDA stream that writes its own progress word."""

    def __init__(self, device: CudaDevice, name: str, word: int) -> None:
        self.name = name
        self.word = word
        self._device = device
        self._driver = device.driver
        self._handle = device.driver("cuStreamCreate", device.driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._submitted = 0
        self._events: dict[int, Any] = {}  # by value, oldest first, those that may not have passed
        self._spare: list[Any] = []

    def wait(self, event: EventHandle) -> None:
        source = self._device.streams.get(event.word)
        if source is None or not source.has_submitted(event.value):
            flags = self._driver.api.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
            address = self._device.word_address(event.word)
            self._driver("cuStreamWaitValue64", self._handle, address, event.value, flags)
        elif (pending := source.pending(event.value)) is not None:
            self._driver("cuStreamWaitEvent", self._handle, pending, 0)

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> EventHandle:
        for destination, source, nbytes in copies:
            self._driver("cuMemcpyAsync", destination, source, nbytes, self._handle)
        self._submitted += 1
        event = self._unused_event()
        self._driver("cuEventRecord", event, self._handle)
        self._events[self._submitted] = event
        # The write is ordered behind the copies and visible to the whole system (no flag: full barrier).
        self._driver("cuStreamWriteValue64", self._handle, self._device.word_address(self.word), self._submitted, 0)
        return EventHandle(self.word, self._submitted)

    def has_submitted(self, value: int) -> bool:
        return value <= self._submitted

    def pending(self, value: int) -> Any | None:
        """The CUDA event of a submitted copy; None if it has passed for sure."""
        return self._events.get(value)

    def completed(self) -> int:
        code = self._driver.api.cuStreamQuery(self._handle)[0]
        results = self._driver.api.CUresult
        if code not in (results.CUDA_SUCCESS, results.CUDA_ERROR_NOT_READY):
            raise CudaError(f"a copy on stream {self.name} failed: {code.name}")
        return self._device.words.load(self.word)

    def close(self) -> None:
        """Waits for the work submitted."""
        self._driver("cuStreamSynchronize", self._handle)
        for event in (*self._events.values(), *self._spare):
            self._driver("cuEventDestroy", event)
        self._driver("cuStreamDestroy", self._handle)

    def _unused_event(self) -> Any:
        """A waiting stream keeps what an event stood for when it was told to wait, so events can be recorded anew."""
        done = self._device.words.load(self.word)
        for value in [value for value in self._events if value <= done]:
            self._spare.append(self._events.pop(value))
        if self._spare:
            return self._spare.pop()
        return self._driver("cuEventCreate", self._driver.api.CUevent_flags.CU_EVENT_DISABLE_TIMING)


class PinnedFile:
    """A `HostRegion` registered with the driver, so that copies run at full speed beside the caller.

    What cannot be registered (a file on disk on some systems) stays pageable: right, but slower; `pinned` tells.
    """

    def __init__(self, driver: Driver, path: str, *, writable: bool, populate: bool) -> None:
        self._driver = driver
        self._file = MappedFile(path, writable=writable, populate=populate)
        self.base = self._file.base
        self.nbytes = self._file.nbytes
        flags = driver.api.CU_MEMHOSTREGISTER_PORTABLE | (0 if writable else driver.api.CU_MEMHOSTREGISTER_READ_ONLY)
        try:
            driver("cuMemHostRegister", self.base, self.nbytes, flags)
            self.pinned = True
        except CudaError:
            self.pinned = False

    def close(self) -> None:
        """Unpins and unmaps it; a second call does nothing."""
        if self.pinned:
            self._driver("cuMemHostUnregister", self.base)
            self.pinned = False
        self._file.close()
        self.base = 0


class CudaDevice:
    """A `Device`: `memory_bytes` of one GPU. Parameters as for `CpuDevice`; `ordinal` is the GPU's number."""

    def __init__(
        self, memory_bytes: int, words: SharedWords, *, stream_words: Sequence[int] | None = None, ordinal: int = 0
    ) -> None:
        self.driver = Driver()
        try:
            self.driver("cuInit", 0)
            self._gpu = self.driver("cuDeviceGet", ordinal)
            self._context = self.driver("cuDevicePrimaryCtxRetain", self._gpu)
            self.driver("cuCtxSetCurrent", self._context)
        except RuntimeError as error:  # the bindings' own, too, where there is no driver to load
            raise UserError(f"there is no usable GPU {ordinal}: {error}", param="device") from error
        self._pages = CudaPages(self.driver, memory_bytes, ordinal)
        self.page_bytes = self._pages.page_bytes
        self.page_count = len(self._pages.handles)
        self.words = words
        self.driver(
            "cuMemHostRegister", words.base, words.count * WORD_BYTES, self.driver.api.CU_MEMHOSTREGISTER_DEVICEMAP
        )
        self._words_address = int(self.driver("cuMemHostGetDevicePointer", words.base, 0))
        self._free_words = list(range(words.count) if stream_words is None else stream_words)
        self.streams: dict[int, CudaStream] = {}  # by word
        self._ranges: list[CudaRange] = []
        self._regions: set[PinnedFile] = set()

    def word_address(self, word: int) -> int:
        """Where the GPU sees it."""
        return self._words_address + word * WORD_BYTES

    def reserve(self, nbytes: int) -> CudaRange:
        self._ranges.append(CudaRange(self.driver, self._pages, nbytes))
        return self._ranges[-1]

    def stream(self, name: str) -> CudaStream:
        word = self._free_words.pop(0)
        self.streams[word] = CudaStream(self, name, word)
        return self.streams[word]

    def passed(self, event: EventHandle) -> bool:
        return self.words.load(event.word) >= event.value

    def wait(self, event: EventHandle, *, timeout_ns: int) -> bool:
        deadline_ns = time.monotonic_ns() + timeout_ns
        while not self.words.wait(event.word, event.value, timeout_ns=_POLL_NS):
            if time.monotonic_ns() > deadline_ns:
                return False
        return True

    def open_host(self, path: str, *, writable: bool, populate: bool = True) -> PinnedFile:
        self.driver("cuCtxSetCurrent", self._context)
        region = PinnedFile(self.driver, path, writable=writable, populate=populate)
        self._regions.add(region)
        self._regions.difference_update([known for known in tuple(self._regions) if not known.base])
        return region

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()
        for space in self._ranges:
            space.close()
        for region in self._regions:
            region.close()
        self._pages.close()
        self.driver("cuMemHostUnregister", self.words.base)
        self.driver("cuDevicePrimaryCtxRelease", self._gpu)
