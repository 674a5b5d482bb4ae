"""An instance's part in loads over several devices' links: what it asks of its peers, and the pages that it lends.

`memory.peers.links` brings the two together. A demanded load begins at once over the instance's own link; peers join it
as they come. An instance carries for one peer at a time, and only with pages that are free and while no demanded load
of its own is under way. The pages are in no range. They come back once the load wants no more, which is the event of
the copy on the relay's stream: as no load waits for its peers, that is soon.

Laws: (L1) the lent pages are those booked for staging; (L2) pages are lent exactly while something is carried.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aegis.core.effects import Effect, PeerWords, RemoteLoad, Send, StageImage, StreamName
from aegis.core.errors import LawBroken
from aegis.core.ids import PageRun
from aegis.core.messages import CarryBegan, CarryImage, CarryOver, LoadOver, NeedLinks, PeerReady
from aegis.core.model import LEAST_PIECES, PIECE_BYTES, PLACES
from aegis.core.request import EventHandle
from memory.balloon import Balloon, PageRequestState
from memory.copy_events import Transfers
from memory.pages import NoPages, PagePool, Runs, count_pages

_OWNER: Final = "(staging)"  # no model is named so


class PeerLoads:
    """Operations append to `effects`. Without `words` peers neither help nor are helped. `in_memory`: images are in
    host memory although no extents of a model cache are told, as in simulations of time."""

    __slots__ = (
        "_asked",
        "_balloon",
        "_carried",
        "_effects",
        "_in_memory",
        "_pages",
        "_pool",
        "_runs",
        "_transfers",
        "_waiting",
        "_words",
    )

    def __init__(
        self,
        pool: PagePool,
        balloon: Balloon,
        transfers: Transfers,
        effects: list[Effect],
        words: PeerWords | None,
        *,
        page_bytes: int,
        in_memory: bool = False,
    ) -> None:
        self._pool = pool
        self._balloon = balloon
        self._transfers = transfers
        self._effects = effects
        self._words = words
        self._in_memory = in_memory
        self._pages = PLACES * -(-PIECE_BYTES // page_bytes)
        self._asked: dict[EventHandle, None] = {}  # loads under way that peers may carry parts of
        self._carried: tuple[CarryImage, EventHandle] | None = None
        self._runs: Runs = ()
        self._waiting: CarryImage | None = None  # for pages

    @property
    def lent(self) -> int:
        """Pages."""
        return count_pages(self._runs)

    def may_share(self, nbytes: int, cached: tuple[PageRun, ...]) -> bool:
        """Whether peers could carry parts of a demanded load."""
        return bool(self._words and (cached or self._in_memory) and nbytes >= LEAST_PIECES * PIECE_BYTES)

    def began(self, load: EventHandle, nbytes: int, cached: tuple[PageRun, ...]) -> None:
        """A load that may be shared."""
        assert self._words
        self._asked[load] = None
        self._effects.append(Send(NeedLinks(load, nbytes, cached, self._words.requests)))

    def on_message(self, message: CarryImage | PeerReady) -> None:
        match message:
            case CarryImage():
                self._carry(message)
            case PeerReady(load, peer, instance, address, runs, staged) if load in self._asked:
                self._effects.append(RemoteLoad(load, peer, instance, address, runs, staged))
            case PeerReady():
                pass  # the load has ended meanwhile

    def progress(self) -> None:
        """Books what has ended."""
        for load in [load for load in self._asked if self._transfers.passed(load)]:
            del self._asked[load]
            self._effects.append(Send(LoadOver(load)))
        if self._carried and self._transfers.passed(self._carried[1]):
            carried, self._carried = self._carried[0], None
            self._pool.give(_OWNER, self._runs)
            self._runs = ()
            self._effects.append(Send(CarryOver(carried.target, carried.load)))

    def check(self) -> None:
        """Raises LawBroken if a law does not hold."""
        if self._pool.held(_OWNER) != self.lent:
            raise LawBroken(f"L1: {self._pool.held(_OWNER)} pages are booked for staging, {self.lent} are lent")
        if bool(self._runs) != bool(self._carried):
            raise LawBroken(f"L2: {self.lent} pages are lent, carrying {self._carried}")

    def granted(self) -> None:
        """The device has answered, be it about these pages or others. Nothing is asked for a second time."""
        if self._waiting:
            asked, self._waiting = self._waiting, None
            self._carry(asked, patient=False)

    def _carry(self, asked: CarryImage, *, patient: bool = True) -> None:
        """The link is busy while a demanded load of our own goes over it."""
        runs = None if self._busy() else self._take()
        if isinstance(runs, NoPages) and patient and self._balloon.request_state is PageRequestState.ASKED:
            self._waiting = asked
            return
        if runs is None or isinstance(runs, NoPages):
            self._effects.append(Send(CarryOver(asked.target, asked.load)))
            return
        assert self._words
        event = self._transfers.next(StreamName.RELAY)
        self._carried, self._runs = (asked, event), runs
        self._effects.append(StageImage(asked.load, asked.nbytes, asked.cached, asked.requests, runs, event))
        self._effects.append(Send(CarryBegan(asked.target, asked.load, asked.peer, runs, self._words.staged)))

    def _take(self) -> Runs | NoPages:
        """Pages that are owed are not free."""
        free = self._pool.free - self._balloon.short
        if free < self._pages:
            self._balloon.want(self._pages - free, urgent=False)
            return NoPages(self._pages, free)
        return self._pool.take(_OWNER, self._pages)

    def _busy(self) -> bool:
        flying: Mapping[StreamName, int] = self._transfers.by_stream()
        carries = self._carried is not None or self._waiting is not None
        return carries or flying[StreamName.WEIGHTS] > 0 or self._words is None
