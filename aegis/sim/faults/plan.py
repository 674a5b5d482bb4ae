"""The faults of a run, drawn from its seed.

Each kind of fault has a random stream of its own: with fewer kinds the others happen as before. A fault that is not
here cannot happen: a link keeps the order of one sender's messages and delivers nothing twice, so messages are late, or
lost with the process they go to, and no more. Commands of users, who retry them, come twice.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from aegis.core.clock import NS_PER_MS
from aegis.core.errors import UserError
from aegis.core.rng import Stream


class Kind(StrEnum):
    CRASH = "crash"  # instances die, which is noticed later, and come up again or never
    PAUSE = "pause"  # they stand still for a while (SIGSTOP)
    DELAY = "delay"  # messages of a link are late
    REORDER = "reorder"  # messages of proxy and node, to and from an instance, come in any order
    TWICE = "twice"  # commands are retried
    MEMORY = "memory"  # other processes take pages and host slabs, and are slow to give them back
    SLOW = "slow"  # copies take many times as long
    IMAGE = "image"  # weight images cannot be read
    STEP = "step"  # engines raise
    LEAVE = "leave"  # clients leave
    REMOVE = "remove"  # models are removed in the middle of their work, and come back
    UNLOAD = "unload"  # users have models' weights leave all memory, in the middle of their work
    MOVE = "move"  # and move models with their requests from instance to instance


EVERY = frozenset(Kind)


@dataclass(frozen=True, slots=True)
class Crash:
    """The crash of the living instance number `victim`, modulo their count."""

    at_ns: int
    victim: int
    unnoticed_ns: int
    absent_ns: int
    for_good: bool


@dataclass(frozen=True, slots=True)
class Spell:
    """`victim` is slow, late or stands still for so long; `by`: nanoseconds, or how many times."""

    at_ns: int
    victim: int
    for_ns: int
    by: int


@dataclass(frozen=True, slots=True)
class Unload:
    """The unloading of the served model number `victim`, modulo their count."""

    at_ns: int
    victim: int


@dataclass(frozen=True, slots=True)
class Move:
    """The move of the served model number `victim`, modulo their count, to the instance number `target`, from wherever
    its requests are or from the instance number `source`, likewise."""

    at_ns: int
    victim: int
    target: int
    source: int | None


@dataclass(frozen=True, slots=True)
class NeighbourStay:
    """A process that wants so many thousandths of all pages and of all host slabs, and leaves after `for_ns`."""

    at_ns: int
    for_ns: int
    pages: int
    slabs: int
    refuses: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that goes wrong in a run."""

    kinds: frozenset[Kind] = frozenset()
    crashes: tuple[Crash, ...] = ()
    pauses: tuple[Spell, ...] = ()
    delays: tuple[Spell, ...] = ()
    slow: tuple[Spell, ...] = ()
    slowness: int = 1  # of all copies, at any time
    neighbours: tuple[NeighbourStay, ...] = ()
    parted: bool = False
    commands_twice: bool = False
    unreadable_share: float = 0.0
    failing_share: float = 0.0
    leaving_share: float = 0.0
    removals: int = 0
    unloads: tuple[Unload, ...] = ()
    moves: tuple[Move, ...] = ()

    def __str__(self) -> str:
        return ", ".join(sorted(self.kinds)) or "nothing"


NOTHING = Plan()


def kinds_of(names: Collection[str]) -> frozenset[Kind]:
    """Raises UserError."""
    for name in names:
        if name not in set(Kind):
            raise UserError(f"--fault: there is no '{name}'; there are {', '.join(Kind)}")
    return frozenset(Kind(name) for name in names)


def draw_plan(seed: int, kinds: frozenset[Kind], span_ns: int) -> Plan:
    """The plan of a run whose requests come within `span_ns`. About half of all kinds happen, of fewer kinds each."""
    chance = Stream(seed, "faults", "kinds")
    drawn = {kind for kind in Kind if chance.below(2)}
    happen = frozenset(drawn or {Kind.CRASH}) if kinds == EVERY else kinds
    draws = {kind: Stream(seed, "faults", kind) for kind in Kind}

    def share(kind: Kind, most: float) -> float:
        return draws[kind].uniform() * most if kind in happen else 0.0

    return Plan(
        kinds=happen,
        crashes=_crashes(draws[Kind.CRASH], span_ns) if Kind.CRASH in happen else (),
        pauses=_spells(draws[Kind.PAUSE], span_ns, most=4, by=1) if Kind.PAUSE in happen else (),
        delays=_spells(draws[Kind.DELAY], span_ns, most=16, by=60 * NS_PER_MS) if Kind.DELAY in happen else (),
        slow=_spells(draws[Kind.SLOW], span_ns, most=6, by=100) if Kind.SLOW in happen else (),
        slowness=(1, 10, 50)[draws[Kind.SLOW].below(3)] if Kind.SLOW in happen else 1,
        neighbours=_neighbours(draws[Kind.MEMORY], span_ns) if Kind.MEMORY in happen else (),
        parted=Kind.REORDER in happen,
        commands_twice=Kind.TWICE in happen,
        unreadable_share=share(Kind.IMAGE, 0.2),
        failing_share=share(Kind.STEP, 0.05),
        leaving_share=share(Kind.LEAVE, 1.0),
        removals=1 + draws[Kind.REMOVE].below(4) if Kind.REMOVE in happen else 0,
        unloads=_unloads(draws[Kind.UNLOAD], span_ns) if Kind.UNLOAD in happen else (),
        moves=_moves(draws[Kind.MOVE], span_ns) if Kind.MOVE in happen else (),
    )


def _crashes(draw: Stream, span_ns: int) -> tuple[Crash, ...]:
    """Now and then one after the other, as soon as an instance is back."""
    hurried = draw.below(4) == 0
    return tuple(
        Crash(
            at_ns=draw.below(span_ns),
            victim=draw.below(1 << 16),
            unnoticed_ns=draw.below(NS_PER_MS if hurried else 1 + draw.below(80 * NS_PER_MS)),
            absent_ns=draw.below(NS_PER_MS if hurried else 60 * NS_PER_MS),
            for_good=draw.below(12) == 0,
        )
        for _ in range(1 + draw.below(12 if hurried else 5))
    )


def _spells(draw: Stream, span_ns: int, *, most: int, by: int) -> tuple[Spell, ...]:
    return tuple(
        Spell(
            at_ns=draw.below(span_ns),
            victim=draw.below(1 << 16),
            for_ns=1 + draw.below(100 * NS_PER_MS),
            by=1 + draw.below(by),
        )
        for _ in range(1 + draw.below(most))
    )


def _unloads(draw: Stream, span_ns: int) -> tuple[Unload, ...]:
    return tuple(Unload(at_ns=draw.below(span_ns), victim=draw.below(1 << 16)) for _ in range(1 + draw.below(12)))


def _moves(draw: Stream, span_ns: int) -> tuple[Move, ...]:
    """Now and then the requests are moved all the time."""
    return tuple(
        Move(
            at_ns=draw.below(span_ns),
            victim=draw.below(1 << 16),
            target=draw.below(1 << 16),
            source=draw.below(1 << 16) if draw.below(4) == 0 else None,
        )
        for _ in range(1 + draw.below(64 if draw.below(3) == 0 else 12))
    )


def _neighbours(draw: Stream, span_ns: int) -> tuple[NeighbourStay, ...]:
    return tuple(
        NeighbourStay(
            at_ns=draw.below(span_ns),
            for_ns=1 + draw.below(200 * NS_PER_MS),
            pages=draw.below(1000),
            slabs=draw.below(1000),
            refuses=draw.below(2) == 0,
        )
        for _ in range(1 + draw.below(3))
    )
