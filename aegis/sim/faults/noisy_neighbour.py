"""A process on the node that takes memory, is slow to give it back or refuses, and ends with all it has."""

from __future__ import annotations

from collections.abc import Callable

from aegis.core.ids import InstanceId, PageRun
from aegis.core.messages import (
    ForgetPeer,
    FromInstance,
    GaveBack,
    GrantPages,
    NeedPages,
    NeedSlabs,
    PeerForgotten,
    TakeBack,
    ToInstance,
)
from aegis.sim.faults.state import FaultWorldState
from memory.pages import PagePool, Runs

_SLOWNESS_NS = 30_000_000


class NoisyNeighbour:
    """A process with the protocol of an instance. `say` brings its messages to the node."""

    def __init__(
        self,
        state: FaultWorldState,
        name: InstanceId,
        say: Callable[[InstanceId, FromInstance], None],
        *,
        refuses: bool,
    ) -> None:
        self.name = name
        self.alive = True
        self._state = state
        self._say = say
        self._refuses = refuses
        self._pool = PagePool()

    def begin(self, pages: int, slabs: int) -> None:
        if pages:
            self._say(self.name, NeedPages(pages, urgent=False))
        if slabs:
            self._say(self.name, NeedSlabs(slabs))

    def told(self, message: ToInstance) -> None:
        if not self.alive:
            return
        match message:
            case GrantPages(runs):
                self._own(runs)
                self._pool.inflate(runs)
            case TakeBack():
                self._state.after(self._state.draw.below(_SLOWNESS_NS), lambda: self._give(message))
            case ForgetPeer(peer, _):
                self._state.after(
                    self._state.draw.below(_SLOWNESS_NS), lambda: self._say(self.name, PeerForgotten(peer))
                )

    def _own(self, runs: Runs) -> None:
        pages = [page for run in runs for page in range(run.start, run.stop)]
        assert not self._state.dirty & set(pages), "another one's bytes come into reach"
        assert not self._state.pages.keys() & set(pages), "a page has two owners"
        self._state.pages.update(dict.fromkeys(pages, self.name))
        self._state.dirty.update(pages)

    def _give(self, asked: TakeBack) -> None:
        if not self.alive:
            return
        if self._refuses and not asked.gentle:
            self._say(self.name, GaveBack(asked.number, (), refused=True, spare=0))
            return
        count = min(asked.pages, self._pool.free - (asked.keep if asked.gentle else 0))
        runs: tuple[PageRun, ...] = ()
        if count > 0:
            clean, dirty = self._pool.deflate(count)
            runs = (*clean, *dirty)
        for page in [page for run in runs for page in range(run.start, run.stop)]:
            del self._state.pages[page]
            self._state.dirty.discard(page)
        self._say(self.name, GaveBack(asked.number, runs))
