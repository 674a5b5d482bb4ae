"""Physical pages as one process of the CPU device sees them.

Mapping a page anew costs more than copying it: the kernel fills 512 page-table entries and empties them again at unmap.
So a page's entries are filled once in the life of the process, at the page's *home*, a mapping of the whole memory at
addresses that are known to nobody else. `send` carries the filled page table from there into a range and `fetch`
carries it home, both with mremap, which moves the table as a whole because everything is aligned to 2 MiB: below 1 µs a
page in long runs, about 6 µs for scattered single pages.

Hence every page is at one place at a time, address space that lost its page has no access from that moment on, and a
touch of it crashes (SIGSEGV) at full speed and in production as it does in tests. So does a touch of the home of a page
that is not ours. Access is given and taken with mprotect, which keeps the entries: a page that comes back from another
process is ready in a third of the time that filling its table took.

Slow work is done in the background: a thread makes granted pages ready, and the stream that wipes pages takes the
access to them. They hold the lock for half a millisecond at most, and a thread that waits for it comes next.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Lock, Thread

from aegis.core.errors import UserError
from aegis.core.ids import PageRun
from aegis.device.cpu.libc import carry, clear, map_file, populate, protect, release, reserve, reserve_file
from aegis.device.cpu.pool import PAGE_BYTES, TouchedPages

WIPE_PAGES = 8
"""The number of pages that are wiped in one go: taking the access to them takes 0.5 ms."""
_STEPS = 4  # in which a page is made ready, each 0.4 ms where the operating system has to find memory

_FOREIGN, _CLOSED, _OPEN, _READY, _MAPPED, _WIPING = (bytes([state]) for state in range(6))
_STATES = ("not ours", "ours and closed", "ours and open", "ours and in no range", "mapped already", "being wiped")
_AT_HOME = _CLOSED + _OPEN + _READY


class FairLock:
    """A lock that goes to the thread that has waited for it, not to one that asks again at once after giving it up."""

    __slots__ = ("_lock", "_next")

    def __init__(self) -> None:
        self._next, self._lock = Lock(), Lock()

    def __enter__(self) -> None:
        self._next.acquire()
        self._lock.acquire()
        self._next.release()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class PhysicalPages:
    """The pages of the pool at `address`. Contents stay when a page moves.

    A page is foreign; or ours and at home, where it is closed, then open, then ready (its entries are filled); or
    mapped in a range; or being wiped, after which it is closed. Raises UserError if there is no such pool.
    """

    __slots__ = ("_closing", "_fd", "_filled", "_granted", "_home", "_state", "_thread", "_touched", "count", "lock")

    def __init__(self, address: str) -> None:
        try:
            self._fd = os.open(address, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise UserError(f"cannot open the memory of the device at {address}: {error.strerror}") from error
        self.count = os.fstat(self._fd).st_size // PAGE_BYTES
        self._touched = TouchedPages(self._fd, self.count)
        self._home = AddressSpace(self.count)
        reserve_file(self._fd, self.count * PAGE_BYTES, self._home.base)
        self._state = bytearray(self.count)
        self._filled = bytearray(self.count)  # a hint: the memory of a lost process takes its entries along
        self.lock = FairLock()  # guards the states, and access and entries at home
        self._granted: SimpleQueue[PageRun | None] = SimpleQueue()
        self._closing = False
        self._thread = Thread(target=self._prepare_granted, name="device pages", daemon=True)
        self._thread.start()

    def grant(self, runs: Sequence[PageRun]) -> None:
        with self.lock:
            for start, stop in runs:
                self._turn(start, stop, _FOREIGN, _CLOSED)
                if not self._touched.all(start, stop):
                    self._filled[start:stop] = bytes(stop - start)
        self._touched.mark(runs)
        for run in runs:
            self._granted.put(run)

    def revoke(self, runs: Sequence[PageRun]) -> None:
        with self.lock:
            for start, stop in runs:
                self._leave_home(start, stop, _FOREIGN)
                protect(self._address(start), (stop - start) * PAGE_BYTES, access=False)

    def start_wiping(self, runs: Sequence[PageRun]) -> None:
        with self.lock:
            for start, stop in runs:
                self._leave_home(start, stop, _WIPING)

    def wipe(self, start: int, stop: int) -> None:
        """Zeroes the pages. May be called in any thread, after `start_wiping`, for `WIPE_PAGES` at most."""
        address, nbytes = self._address(start), (stop - start) * PAGE_BYTES
        with self.lock:
            protect(address, nbytes, access=True)
        clear(address, nbytes)
        with self.lock:
            protect(address, nbytes, access=False)
            self._turn(start, stop, _WIPING, _CLOSED)

    def send(self, start: int, stop: int, address: int) -> None:
        """Maps a run of pages at `address`. The caller holds the lock."""
        count, offset = stop - start, start * PAGE_BYTES
        if self._state[start:stop] != _READY * count:
            self._make_ready(start, stop)
        self._state[start:stop] = _MAPPED * count
        if not carry(self._home.base + offset, address, count * PAGE_BYTES):
            map_file(self._fd, count * PAGE_BYTES, offset=offset, address=address)

    def fetch(self, start: int, stop: int, address: int) -> None:
        """Takes a run of pages back from `address`; the caller, which holds the lock, takes access from there or gives
        the addresses up."""
        self._turn(start, stop, _MAPPED, _READY)
        nbytes, home = (stop - start) * PAGE_BYTES, self._home.base + start * PAGE_BYTES
        if not carry(address, home, nbytes):
            map_file(self._fd, nbytes, offset=start * PAGE_BYTES, address=home, populate=False)

    def close(self) -> None:
        """Gives up all reach. No range may have a page left."""
        assert _MAPPED not in self._state
        self._closing = True
        self._granted.put(None)
        self._thread.join()
        self._home.close()
        self._touched.close()
        os.close(self._fd)

    def _address(self, page: int) -> int:
        return self._home.base + page * PAGE_BYTES

    def _turn(self, start: int, stop: int, old: bytes, new: bytes) -> None:
        count = stop - start
        assert self._state[start:stop] == old * count and count > 0, self._trouble(start, stop, old)
        self._state[start:stop] = new * count

    def _trouble(self, start: int, stop: int, expected: bytes) -> str:
        if not 0 <= start < stop <= self.count:
            return f"no pages [{start}, {stop})"
        page = next(page for page in range(start, stop) if self._state[page] not in expected)
        return f"page {page} is {_STATES[self._state[page]]}"

    def _leave_home(self, start: int, stop: int, new: bytes) -> None:
        states = self._state[start:stop]
        assert len(states) == stop - start > 0 and not states.strip(_AT_HOME), self._trouble(start, stop, _AT_HOME)
        self._state[start:stop] = new * (stop - start)

    def _make_ready(self, start: int, stop: int) -> None:
        """Makes pages ready that the thread has not come to."""
        self._leave_home(start, stop, _READY)
        protect(self._address(start), (stop - start) * PAGE_BYTES, access=True)
        if 0 in self._filled[start:stop]:
            populate(self._address(start), (stop - start) * PAGE_BYTES)
            self._filled[start:stop] = b"\1" * (stop - start)

    def _prepare_granted(self) -> None:
        while (run := self._granted.get()) is not None:
            for page in range(*run):
                for step in range(_STEPS):
                    if self._closing:
                        return
                    with self.lock, suppress(OSError):  # no memory: the mapping of the page will fail, too
                        self._prepare(page, step)

    def _prepare(self, page: int, step: int) -> None:
        if self._state[page] != (_OPEN if step else _CLOSED)[0]:
            return  # the mapping thread was faster, or the page has gone
        if step == 0:
            protect(self._address(page), PAGE_BYTES, access=True)
            self._turn(page, page + 1, _CLOSED, _READY if self._filled[page] else _OPEN)
        if not self._filled[page]:
            populate(self._address(page) + step * PAGE_BYTES // _STEPS, PAGE_BYTES // _STEPS)
            if step == _STEPS - 1:
                self._filled[page] = 1
                self._turn(page, page + 1, _OPEN, _READY)


class AddressSpace:
    """Reserved addresses, aligned to pages; no access and no memory."""

    __slots__ = ("_nbytes", "_start", "base")

    def __init__(self, pages: int) -> None:
        self._nbytes = (pages + 1) * PAGE_BYTES  # one more, to align
        self._start = reserve(self._nbytes)
        self.base = -(-self._start // PAGE_BYTES) * PAGE_BYTES

    def close(self) -> None:
        release(self._start, self._nbytes)
