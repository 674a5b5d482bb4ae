"""The time in which memory passes from one process to another: unmapped, wiped and revoked here, granted and mapped
there.

Two processes hold one pool's pages in turn, as two instances do when one deflates and the other inflates; a pipe stands
for the messages. The first time a process gets a page it has to fill its page table; later it only gets access again.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from msgspec import Struct

from aegis.core.ids import PageRun
from aegis.device.cpu.device import CpuDevice
from aegis.device.cpu.libc import clear
from aegis.device.cpu.pool import PAGE_BYTES, CpuPool
from aegis.device.shared_events import SharedWords

NBYTES = 256 << 20
_TIMEOUT_NS = 60_000_000_000


class Handing(Struct, frozen=True):
    """`nbytes` were mapped by the other process after `first_ns` when it had never had them, later on after `total_ns`:
    `revoke_ns`, `grant_ns` and the messages. Medians but for the first."""

    nbytes: int
    first_ns: int
    revoke_ns: int
    grant_ns: int
    total_ns: int


class Holder:
    """Holds all pages of a pool or none."""

    def __init__(self, address: str, words: SharedWords, word: int) -> None:
        self._device = CpuDevice(address, words, stream_words=[word])
        self._pages = [PageRun(0, self._device.page_count)]
        self._space = self._device.reserve(self._device.page_count * PAGE_BYTES)
        self._scrub = self._device.stream("scrub")

    def take(self) -> None:
        self._device.grant(self._pages)
        self._space.map(0, self._pages)

    def give(self) -> None:
        self._space.unmap(0, self._device.page_count)
        assert self._device.wait(self._scrub.wipe(self._pages), timeout_ns=_TIMEOUT_NS)
        self._device.revoke(self._pages)

    def touch(self) -> None:
        clear(self._space.base, self._space.nbytes)

    def close(self) -> None:
        self._device.close()


class _Peer:
    """A holder in a process of its own."""

    def __init__(self, pool: CpuPool, words: SharedWords) -> None:
        command = [sys.executable, "-m", "bench.lab.memory.page_transfer", pool.address, words.path]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.do("hello")

    def do(self, what: str) -> int:
        """Returns how long it says that it took."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def handing(nbytes: int = NBYTES, repetitions: int = 9) -> Handing:
    words, pool = SharedWords.create(2), CpuPool(nbytes, ahead_pages=0)
    ours, peer = Holder(pool.address, words, 0), _Peer(pool, words)
    ours.take()
    ours.touch()
    totals_ns, revokes_ns, grants_ns = [], [], []
    for _ in range(repetitions):
        start_ns = time.perf_counter_ns()
        revokes_ns.append(_timed(ours.give))
        grants_ns.append(peer.do("take"))
        totals_ns.append(time.perf_counter_ns() - start_ns)
        peer.do("touch")
        peer.do("give")
        ours.take()
        ours.touch()
    peer.close()
    ours.close()
    pool.close()
    words.close()
    return Handing(
        nbytes=pool.page_count * PAGE_BYTES,
        first_ns=totals_ns[0],
        revoke_ns=round(statistics.median(revokes_ns[1:])),
        grant_ns=round(statistics.median(grants_ns[1:])),
        total_ns=round(statistics.median(totals_ns[1:])),
    )


def _timed(action: Callable[[], None]) -> int:
    start_ns = time.perf_counter_ns()
    action()
    return time.perf_counter_ns() - start_ns


def _serve(address: str, words_path: str) -> None:
    """The peer: does what each line says."""
    words = SharedWords.open(words_path)
    holder = Holder(address, words, 1)
    actions = {"take": holder.take, "give": holder.give, "touch": holder.touch, "hello": lambda: None}
    for line in sys.stdin:
        print(_timed(actions[line.strip()]), flush=True)
    holder.close()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
