"""The device protocol: streams, events, virtual ranges, physical pages, host memory, copies. Bytes only, no counting.

CUDA and CPU implement it alike (rule 4). Addresses are plain integers; sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from aegis.core.copy_order import NOW
from aegis.core.ids import PageRun
from aegis.core.request import EventHandle
from aegis.device.divisions import Shares


class CopyTimes(NamedTuple):
    """The time in which the copy with this value was worked on, without waits for other events; on the monotonic
    clock."""

    value: int
    start_ns: int
    stop_ns: int


class Stream(Protocol):
    """A queue of work done in order, beside the caller. What is submitted later starts later."""

    @property
    def word(self) -> int:
        """The shared word this stream writes its progress to."""
        ...

    def wait(self, event: EventHandle) -> None:
        """All work submitted from now on waits for `event`, which may belong to another process."""
        ...

    def copy(self, copies: Sequence[tuple[int, int, int]], *, urgency: int = NOW) -> EventHandle:
        """Copies `(destination, source, nbytes)` in order, letting more urgent copies of this process pass between two
        chunks. Returns the event of their completion, whose value is one more than that of the previous `copy` on this
        stream (the first is 1)."""
        ...

    def wipe(self, runs: Sequence[PageRun]) -> EventHandle:
        """Zeroes pages that were granted and are in no range. Counts as a copy."""
        ...

    def abandon(self, event: EventHandle) -> None:
        """The rest of this copy need not be done, because nobody needs its target any more. Its event passes all the
        same."""
        ...

    def completed(self) -> int:
        """The value of the last completed copy, 0 if none. Raises what a copy raised."""
        ...

    def took(self) -> list[CopyTimes]:
        """Copies that have completed since the last call, in order, as well as their times are known."""
        ...


class VirtualRange(Protocol):
    """Address space reserved once, at a base address that never changes. Touching what is not mapped crashes."""

    @property
    def base(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def map(self, offset_pages: int, runs: Sequence[PageRun]) -> None:
        """Backs consecutive pages from `offset_pages` with these physical pages, which were granted."""
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


class PeerMemory(Protocol):
    """Pages of another device that their holder lends, one behind the other, to be copied from."""

    @property
    def base(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def close(self) -> None:
        """No copy from it is under way. A second call does nothing."""
        ...


class PhysicalPool(Protocol):
    """The memory of one device, made once by the process that keeps its accounts and shared by all instances on it."""

    @property
    def address(self) -> str:
        """The address that `open_device` needs in another process of the same user."""
        ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def page_count(self) -> int: ...

    def wipe(self, runs: Sequence[PageRun]) -> None:
        """Zeroes pages that no process maps: those of a lost one. Blocks."""
        ...

    def close(self) -> None:
        """Every process that opened it must be gone, or going."""
        ...


class Lane(Protocol):
    """A share of the device's compute: what runs in it has that share and no more, whatever runs in other lanes.
    Memory is not divided."""

    @property
    def share(self) -> int:
        """The lane's share of the device's compute, in thousandths."""
        ...

    @property
    def threads(self) -> int:
        """The number of threads that an engine computes with here; of no account on a GPU, where it is 1."""
        ...

    @property
    def stream(self) -> int:
        """The CUDA stream whose kernels run here, as a handle; 0 on a CPU."""
        ...

    def enter(self) -> None:
        """The calling thread computes here from now on, as do threads that it starts afterwards. Once per thread."""
        ...

    def close(self) -> None:
        """Nothing runs in it any more."""
        ...


class Device(Protocol):
    """One accelerator as one instance sees it: `page_count` pages exist, those that were granted are its own."""

    @property
    def name(self) -> str:
        """The name that an engine has for it: `cpu`, `cuda:1`."""
        ...

    @property
    def device_wide(self) -> int:
        """The number of calls of this process that waited for all work of the device. Serving makes none."""
        ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def page_count(self) -> int: ...

    def reserve(self, nbytes: int) -> VirtualRange:
        """Reserves address space; no memory. `nbytes` is rounded up to whole pages."""
        ...

    def grant(self, runs: Sequence[PageRun]) -> None:
        """These pages are this process's from now on. Returns at once: they are made ready to map in the background."""
        ...

    def revoke(self, runs: Sequence[PageRun]) -> None:
        """The pages are not granted any more. They are in no range, and have been wiped if they ever were in one."""
        ...

    def move(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copies `(destination, source, nbytes)` within the device; done when it returns. For little."""
        ...

    def stream(self, name: str, *, outwards: bool = False, between: bool = False) -> Stream:
        """`outwards`: it copies from the device to the host, `between`: from other devices to this one; each is a lane
        of its own."""
        ...

    def open_peer(self, address: str, runs: Sequence[PageRun]) -> PeerMemory | None:
        """Maps pages of the device whose pool has this address. None if no process has it, or no link goes there."""
        ...

    @property
    def lanes_are_timed(self) -> bool:
        """Whether its lanes share the time of the same cores."""
        ...

    def partitions(self) -> tuple[Shares, ...]:
        """What the device can be: `WHOLE`, and then its divisions into lanes. No more than the first where it cannot be
        divided."""
        ...

    def lanes(self, shares: Shares) -> Sequence[Lane]:
        """The lanes of one of its divisions, made anew, in the order of the shares. They are to be closed before the
        device. Raises KeyError if it is no division of the device, OSError if the system refuses."""
        ...

    def passed(self, event: EventHandle) -> bool:
        """Whether an event of any process of the node has passed. Never blocks."""
        ...

    def wait(self, event: EventHandle, *, timeout_ns: int) -> bool:
        """Sleeps until an event of any process of the node has passed; False if it has not after `timeout_ns`."""
        ...

    def open_host(self, path: str, *, writable: bool, populate: bool = True) -> HostRegion:
        """Maps a file or shared memory object whole, its pages faulted in unless `populate` is false. Any thread may.

        Raises UserError if there is nothing to map.
        """
        ...

    def close(self) -> None:
        """Ends the streams' threads and returns all memory."""
        ...
