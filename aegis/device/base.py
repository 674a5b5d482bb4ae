"""The device protocol: streams, events, virtual ranges, physical pages, host memory, copies. Bytes only, no counting.

CUDA and CPU implement it alike (rule 4). Addresses are plain integers; sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from aegis.core.ids import PageId
from aegis.core.request import EventHandle


class Stream(Protocol):
    """A queue of work done in order, beside the caller. What is submitted later starts later."""

    @property
    def word(self) -> int:
        """The shared word this stream writes its progress to."""
        ...

    def wait(self, event: EventHandle) -> None:
        """All work submitted from now on waits for `event`, which may belong to another process."""
        ...

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> EventHandle:
        """Copies `(destination, source, nbytes)` in order. Returns the event of their completion, whose value is one
        more than that of the previous `copy` on this stream (the first is 1)."""
        ...

    def completed(self) -> int:
        """The value of the last completed copy, 0 if none. Raises what a copy raised."""
        ...


class VirtualRange(Protocol):
    """Address space reserved once, at a base address that never changes. Touching what is not mapped crashes."""

    @property
    def base(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def map(self, offset_pages: int, pages: Sequence[PageId]) -> None:
        """Backs consecutive pages from `offset_pages` with these physical pages, in batches of adjacent ones."""
        ...

    def unmap(self, offset_pages: int, count: int) -> None: ...

    def close(self) -> None: ...


class HostRegion(Protocol):
    """Memory of the node that several processes see, each at an address of its own."""

    @property
    def base(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def close(self) -> None: ...


class Device(Protocol):
    """One accelerator as one instance sees it."""

    @property
    def page_bytes(self) -> int: ...

    @property
    def page_count(self) -> int: ...

    def reserve(self, nbytes: int) -> VirtualRange:
        """Reserves address space; no memory. `nbytes` is rounded up to whole pages."""
        ...

    def stream(self, name: str) -> Stream: ...

    def passed(self, event: EventHandle) -> bool:
        """Whether an event of any process of the node has passed. Never blocks."""
        ...

    def wait(self, event: EventHandle, *, timeout_ns: int) -> bool:
        """Sleeps until an event of any process of the node has passed; False if it has not after `timeout_ns`."""
        ...

    def open_host(self, path: str, *, writable: bool, populate: bool = True) -> HostRegion:
        """Maps a file or shared memory object whole, its pages faulted in unless `populate` is false. Any thread may.

        Raises UserError where there is nothing to map.
        """
        ...

    def close(self) -> None:
        """Ends the streams' threads and returns all memory."""
        ...
