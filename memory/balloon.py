"""An instance's share of its device's pages: how it grows, and how it is taken back (Prism §5, ballooning).

Growing: an instance asks for pages, and the owner of the device's accounts (`memory.page_arbiter`) grants them all or
refuses; it remembers a refused request and grants it later. Taking back is a protocol: (1) pages that are owed are
retired as they become free, and no retired page is handed out any more; (2) a page becomes free when every step and
transfer that could touch it has finished, by its event; (3) it is unmapped and, if it was written, wiped; (4) it is
acknowledged. All owed pages are given, or none: when time runs out the retired pages may be handed out again, and the
answer says how many there were.

Laws: (V1) pages granted and not given back are in the pool, retired or leaving; (V2) a leaving page is in no range.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from aegis.core.effects import AcceptPages, Effect, RevokePages, Send, StreamName, WipePages
from aegis.core.errors import LawBroken
from aegis.core.messages import GaveBack, GrantPages, NeedPages, TakeBack
from aegis.core.request import EventHandle
from memory.copy_events import Transfers
from memory.pages import PagePool, Runs, count_pages

OWING_NS: Final = 5_000_000
"""While pages are owed, a core that gets no other event for this long gets a `Tick`."""


class PageRequestState(Enum):
    """The state of the last request for pages."""

    NONE = "none"
    ASKED = "asked"
    REFUSED = "refused"  # it is granted when there are pages
    EXCESSIVE = "excessive"  # never, as long as the instance's limit is what it is


@dataclass(slots=True)
class _PendingTakeBack:
    number: int
    pages: int
    yield_ns: int
    deadline_ns: int
    clean: Runs = ()
    dirty: Runs = ()

    @property
    def retired(self) -> int:
        return count_pages(self.clean) + count_pages(self.dirty)


@dataclass(frozen=True, slots=True)
class _Leaving:
    number: int
    runs: Runs
    wiped: EventHandle


class Balloon:
    """Inflates and deflates an instance's pool. Operations append to `effects`."""

    def __init__(self, pool: PagePool, transfers: Transfers, effects: list[Effect]) -> None:
        self._pool = pool
        self._transfers = transfers
        self._effects = effects
        self._held = 0
        self._last_request = NeedPages(0, urgent=False)
        self.request_state = PageRequestState.NONE
        self._pending: _PendingTakeBack | None = None
        self._leaving: list[_Leaving] = []

    @property
    def held(self) -> int:
        """Pages granted and not given back."""
        return self._held

    @property
    def staying(self) -> int:
        """Pages held that nobody has asked for."""
        return self._held - self.leaving - (self._pending.pages if self._pending else 0)

    @property
    def owes(self) -> bool:
        """Whether pages are to be given back by a deadline."""
        return self._pending is not None

    @property
    def short(self) -> int:
        """Pages that are owed and not free yet."""
        return self._pending.pages - self._pending.retired if self._pending else 0

    @property
    def retired(self) -> int:
        return self._pending.retired if self._pending else 0

    @property
    def leaving(self) -> int:
        return sum(count_pages(leaving.runs) for leaving in self._leaving)

    def must_yield(self, now_ns: int) -> bool:
        """Whether the running batch or job should make way for what is owed. Before that it is only not allowed to
        grow."""
        return self.short > 0 and self._pending is not None and now_ns >= self._pending.yield_ns

    def want(self, pages: int, *, urgent: bool, crowded: bool = False) -> None:
        """Asks for so many more pages, unless the owner knows that already. It asks for nothing else before it has an
        answer."""
        assert pages > 0
        request, last = NeedPages(pages, urgent=urgent, crowded=crowded), self._last_request
        weightier = (urgent and request != last) or (crowded and not last.crowded and not last.urgent)
        if self.request_state is PageRequestState.NONE or (
            self.request_state is not PageRequestState.ASKED and weightier
        ):
            self._send_request(request)

    def content(self) -> None:
        """The urgent need was met in another way, so that other instances need not give anything back for it."""
        if self.request_state in (PageRequestState.REFUSED, PageRequestState.EXCESSIVE) and self._last_request.urgent:
            self._send_request(NeedPages(self._last_request.count, urgent=False))

    @property
    def stands_still(self) -> bool:
        """Whether nothing can go on before other instances have given pages back."""
        return self._last_request.urgent and self.request_state is PageRequestState.REFUSED

    @property
    def hopeless(self) -> bool:
        """Whether work that needs more pages never gets them, because the instance's limit forbids it."""
        return self._last_request.urgent and self.request_state is PageRequestState.EXCESSIVE

    def granted(self, message: GrantPages) -> None:
        if message.refused:
            if self._last_request.count:  # else it has been withdrawn meanwhile
                self.request_state = PageRequestState.EXCESSIVE if message.excessive else PageRequestState.REFUSED
            return
        self.request_state = PageRequestState.NONE
        self._held += count_pages(message.runs)
        self._pool.inflate(message.runs)
        self._effects.append(AcceptPages(message.runs))

    def take_back(self, message: TakeBack, now_ns: int) -> None:
        """Starts giving back; `settle` goes on with it. One at a time."""
        if message.gentle:
            self._withdraw()
            free = self._pool.free - self.short  # owed pages go first
            count = max(min(free, message.pages, self.staying - message.keep), 0)
            self._leave(message.number, *self._pool.deflate(count))
            return
        assert self._pending is None and message.pages <= self._held
        patience_ns = message.patience_ns
        self._pending = _PendingTakeBack(message.number, message.pages, now_ns + patience_ns // 4, now_ns + patience_ns)

    def settle(self, now_ns: int) -> None:
        """Retires pages that have become free, and gives them back when they are all there."""
        pending = self._pending
        if pending is None:
            return
        clean, dirty = self._pool.deflate(min(self.short, self._pool.free))
        pending.clean, pending.dirty = pending.clean + clean, pending.dirty + dirty
        if not self.short:
            self._pending = None
            self._leave(pending.number, pending.clean, pending.dirty)
        self.expire(now_ns)

    def expire(self, now_ns: int) -> None:
        """Gives up on owed pages when it is too late: none is given."""
        pending = self._pending
        if pending and now_ns >= pending.deadline_ns:
            self._pending = None
            self._pool.restore(pending.clean, pending.dirty)
            self._effects.append(Send(GaveBack(pending.number, (), refused=True, spare=pending.retired)))

    def progress(self) -> None:
        """Acknowledges pages that have been wiped."""
        if not self._leaving:
            return
        for leaving in [leaving for leaving in self._leaving if self._transfers.passed(leaving.wiped)]:
            self._leaving.remove(leaving)
            self._give(leaving.number, leaving.runs)

    def check(self) -> None:
        """Raises LawBroken if a law does not hold."""
        parts = (self._pool.capacity, self.retired, self.leaving)
        if sum(parts) != self._held:
            raise LawBroken(f"V1: {parts} pages in the pool, retired and leaving do not make {self._held}")

    def _withdraw(self) -> None:
        """An instance that gives back pages that it does not need asks for no more; but a request without which its
        work stands still keeps its place."""
        if (
            self.request_state in (PageRequestState.REFUSED, PageRequestState.EXCESSIVE)
            and not self._last_request.urgent
        ):
            self._last_request, self.request_state = NeedPages(0, urgent=False), PageRequestState.NONE
            self._effects.append(Send(self._last_request))

    def _send_request(self, request: NeedPages) -> None:
        self._last_request, self.request_state = request, PageRequestState.ASKED
        self._effects.append(Send(request))

    def _leave(self, number: int, clean: Runs, dirty: Runs) -> None:
        if not dirty:
            self._give(number, clean)
            return
        wiped = self._transfers.next(StreamName.SCRUB)
        self._effects.append(WipePages(dirty, wiped))
        self._leaving.append(_Leaving(number, clean + dirty, wiped))

    def _give(self, number: int, runs: Runs) -> None:
        self._held -= count_pages(runs)
        if runs:
            self._effects.append(RevokePages(runs))
        self._effects.append(Send(GaveBack(number, runs)))
