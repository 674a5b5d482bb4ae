"""A process that holds pages of a pool, as an instance does, and trusts nobody.

What arrives must be zeros; it is filled with words that name this process, the page and how often it came, and is
verified again and again until it goes. Messages come on stdin and go to stdout, a line of JSON each, until stdin ends.

Usage: python -m tests.live.memory.page_holder POOL WORDS WORD SEED
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from threading import Thread

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from aegis.core.ids import PageRun
from aegis.core.messages import GaveBack, GrantPages, NeedPages, TakeBack
from aegis.device.cpu.device import CpuDevice
from aegis.device.shared_events import SharedWords

TIMEOUT_NS = 60_000_000_000
LONGEST_REQUEST = 16
PAUSE_S = 0.001  # so that the owner gets a word in on few cores

ToHolder = GrantPages | TakeBack


class Report(Struct, frozen=True, tag=True):
    """The numbers of pages that came, were looked at and went."""

    arrived: int
    verified: int
    left: int


FromHolder = NeedPages | GaveBack | Report


class Holder:
    """Maps page n at offset n of a range as large as the pool."""

    def __init__(self, device: CpuDevice, seed: int) -> None:
        self._device = device
        self._random = random.Random(seed)
        self._seed = seed
        self._space = device.reserve(device.page_count * device.page_bytes)
        self._scrub = device.stream("scrub")
        self._held: dict[int, int] = {}  # page → the word it is filled with
        self._requesting = False
        self.report = Report(0, 0, 0)

    def request(self) -> NeedPages | None:
        """A new one when the last one was granted, and now and then another one instead."""
        if self._requesting and self._random.random() > 0.02:
            return None
        self._requesting = True
        return NeedPages(self._random.randint(1, LONGEST_REQUEST), urgent=self._random.random() < 0.8)

    def granted(self, message: GrantPages) -> None:
        if message.refused:
            return
        self._requesting = False
        self._device.grant(message.runs)
        for run in message.runs:
            self._space.map(run.start, [run])
            for page in range(*run):
                assert not self._words(page).any(), f"page {page} arrived with something in it"
                word = self._seed << 48 | page << 32 | self.report.arrived
                self._words(page).fill(word)
                self._held[page] = word
                self.report = msgspec.structs.replace(self.report, arrived=self.report.arrived + 1)

    def take_back(self, message: TakeBack) -> GaveBack:
        if message.gentle:
            count = max(min(message.pages, len(self._held) - message.keep), 0)
        elif message.pages > len(self._held):
            return GaveBack(message.number, (), refused=True, spare=len(self._held))
        else:
            count = message.pages
        runs = self._give_up(self._random.sample(sorted(self._held), count))
        assert self._device.wait(self._scrub.wipe(runs), timeout_ns=TIMEOUT_NS)
        self._device.revoke(runs)
        return GaveBack(message.number, runs)

    def verify(self, pages: Sequence[int] | None = None) -> None:
        """These pages, one of them by default."""
        for page in self._random.sample(sorted(self._held), bool(self._held)) if pages is None else pages:
            assert (self._words(page) == self._held[page]).all(), f"page {page} is not what it was"
            self.report = msgspec.structs.replace(self.report, verified=self.report.verified + 1)

    def end(self) -> Report:
        self._give_up(list(self._held))
        self._device.close()
        return self.report

    def _give_up(self, pages: list[int]) -> tuple[PageRun, ...]:
        self.verify(pages)
        for page in pages:
            self._space.unmap(page, 1)
            del self._held[page]
        self.report = msgspec.structs.replace(self.report, left=self.report.left + len(pages))
        return tuple(PageRun(page, page + 1) for page in pages)

    def _words(self, page: int) -> npt.NDArray[np.uint64]:
        address = self._space.base + page * self._device.page_bytes
        return np.frombuffer((ctypes.c_char * self._device.page_bytes).from_address(address), np.uint64)


def main(pool: str, words: str, word: str, seed: str) -> None:
    incoming: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=listen, args=(incoming,)).start()
    holder = Holder(CpuDevice(pool, SharedWords.open(words), stream_words=[int(word)]), int(seed))
    while True:
        if request := holder.request():
            say(request)
        holder.verify()
        try:
            line = incoming.get(timeout=PAUSE_S)
        except Empty:
            continue
        if not line:
            return say(holder.end())
        match msgspec.json.decode(line, type=ToHolder):
            case GrantPages() as grant:
                holder.granted(grant)
            case TakeBack() as asked:
                say(holder.take_back(asked))


def listen(incoming: SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        incoming.put(line)
    incoming.put(b"")


def say(message: FromHolder) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
