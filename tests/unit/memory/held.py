"""A balloon with all it stands on."""

from __future__ import annotations

from aegis.core.effects import Effect, StreamName
from aegis.core.ids import PageRun
from aegis.core.messages import GrantPages, TakeBack
from memory.balloon import Balloon
from memory.copy_events import Transfers
from memory.pages import NoPages, PagePool, Runs

WORDS = {name: i for i, name in enumerate(StreamName)}
PAGES, PATIENCE_NS = 16, 40
REFUSED = GrantPages((), refused=True)
EXCESSIVE = GrantPages((), refused=True, excessive=True)


def runs(*pairs: tuple[int, int]) -> Runs:
    return tuple(PageRun(*pair) for pair in pairs)


def pages_of(held: Runs) -> set[int]:
    return {page for run in held for page in range(run.start, run.stop)}


class Held:
    """A balloon with all it stands on, and what it has asked for since the last look."""

    def __init__(self, pages: int = 0) -> None:
        self.effects: list[Effect] = []
        self.pool = PagePool()
        self.transfers = Transfers(WORDS)
        self.balloon = Balloon(self.pool, self.transfers, self.effects)
        if pages:
            self.balloon.granted(GrantPages(runs((0, pages))))
            self.look()

    def look(self) -> list[Effect]:
        effects = list(self.effects)
        self.effects.clear()
        self.balloon.check()
        self.pool.check()
        return effects

    def use(self, count: int) -> Runs:
        taken = self.pool.take("m", count)
        assert not isinstance(taken, NoPages)
        return taken

    def take_back(self, number: int, pages: int, *, now_ns: int = 0, settle: bool = True) -> list[Effect]:
        self.balloon.take_back(TakeBack(number, pages, PATIENCE_NS), now_ns)
        if settle:
            self.balloon.settle(now_ns)
        return self.look()

    def trim(self, number: int, pages: int, *, keep: int = 0) -> list[Effect]:
        self.balloon.take_back(TakeBack(number, pages, PATIENCE_NS, gentle=True, keep=keep), 0)
        return self.look()

    def wiped(self, value: int) -> list[Effect]:
        self.transfers.progress(StreamName.SCRUB, value)
        self.balloon.progress()
        return self.look()
