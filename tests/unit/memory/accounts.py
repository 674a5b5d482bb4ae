"""A device's accounts and what they say, as tests read it."""

from __future__ import annotations

from aegis.core.ids import InstanceId, PageRun
from aegis.core.messages import GaveBack, GrantPages, NeedPages, TakeBack
from memory.page_arbiter import ArbiterEffect, PageArbiter
from memory.pages import Runs, count_pages

A, B, C = (InstanceId(name) for name in "ABC")
PATIENCE_NS, IDLE_NS = 1000, 500
REFUSED = GrantPages((), refused=True)
EXCESSIVE = GrantPages((), refused=True, excessive=True)


def device(pages: int, *names: InstanceId, floor: int = 0, quantum: int = 1) -> PageArbiter:
    arbiter = PageArbiter(pages, floor=floor, idle_ns=IDLE_NS, patience_ns=PATIENCE_NS, quantum=quantum)
    for name in names:
        arbiter.join(name)
    return arbiter


def ask(
    arbiter: PageArbiter, name: InstanceId, pages: int, *, urgent: bool = False, crowded: bool = False
) -> list[ArbiterEffect]:
    effects = arbiter.ask(name, NeedPages(pages, urgent, crowded))
    arbiter.check()
    return effects


def hold(arbiter: PageArbiter, name: InstanceId, pages: int) -> Runs:
    (effect,) = ask(arbiter, name, pages)
    assert isinstance(effect, tuple) and isinstance(effect[1], GrantPages) and count_pages(effect[1].runs) == pages
    return effect[1].runs


def takings(effects: list[ArbiterEffect]) -> dict[InstanceId, int]:
    """From whom how much is taken firmly."""
    return {e[0]: e[1].pages for e in effects if isinstance(e, tuple) and firm(e[1])}


def firm(message: GrantPages | TakeBack) -> bool:
    return isinstance(message, TakeBack) and not message.gentle


def trims(effects: list[ArbiterEffect]) -> dict[InstanceId, int]:
    """Who is trimmed, down to how much."""
    return {e[0]: e[1].keep for e in effects if isinstance(e, tuple) and isinstance(e[1], TakeBack) and not firm(e[1])}


def grants(effects: list[ArbiterEffect]) -> list[tuple[InstanceId, int]]:
    """0 pages: a refusal."""
    found = [e for e in effects if isinstance(e, tuple)]
    return [(name, count_pages(message.runs)) for name, message in found if isinstance(message, GrantPages)]


def number_of(effects: list[ArbiterEffect], name: InstanceId) -> int:
    (found,) = [e[1].number for e in effects if isinstance(e, tuple) and isinstance(e[1], TakeBack) and e[0] == name]
    return found


def give(arbiter: PageArbiter, name: InstanceId, number: int, pages: int) -> list[ArbiterEffect]:
    """Answers a taking with the first pages that are held."""
    runs: list[PageRun] = []
    for run in arbiter._pool.runs_of(name):
        size = min(pages, run.pages)
        runs += [PageRun(run.start, run.start + size)] if size else []
        pages -= size
    assert not pages
    effects = arbiter.gave_back(name, GaveBack(number, tuple(runs)))
    arbiter.check()
    return effects


def refuse(arbiter: PageArbiter, name: InstanceId, number: int, spare: int = 0) -> list[ArbiterEffect]:
    effects = arbiter.gave_back(name, GaveBack(number, (), refused=True, spare=spare))
    arbiter.check()
    return effects


def idle(arbiter: PageArbiter, *names: InstanceId) -> None:
    for name in names:
        arbiter.seen(name, busy=False, now_ns=0)
