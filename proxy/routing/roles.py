"""The choice of the instance that changes between prefill and decode, if requests wait for one role and the other has
time left.

`on(event, now_ns) -> effects`; no clock, no I/O. The load of an instance is a share of the time that there is for its
work: of a prefill instance the time of its queue, of the deadline of a first token; of a decode instance the steps that
its requests want, of the time between two tokens.

(1) A role is short of instances while their mean load is above `SHORT_PPM`.
(2) The other role can spare an instance while its whole load, on one instance less, is below `SPARE_PPM` each; for
    prefill the recent work of its instances counts too, because a queue is short until it is not.
(3) If both have held for `HELD_NS` without a break, the least loaded instance changes.
(4) Then nothing changes for `SETTLED_NS`, and the time of (3) begins anew.

Laws: (R1) the last instance of a role does not change; (R2) under constant loads no role takes an instance back that it
gave: without it its load is less than `SPARE_PPM`, and it takes one only above `SHORT_PPM`; (R3) if (1) and (2) hold
and nothing has changed of late, an instance changes at the first look after `HELD_NS`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from msgspec import Struct

from aegis.core.clock import NS_PER_S
from aegis.core.ids import InstanceId
from aegis.core.role import Role
from aegis.core.views import PPM

SHORT_PPM = 800_000
SPARE_PPM = 600_000
HELD_NS = 10 * NS_PER_S
SETTLED_NS = 30 * NS_PER_S


class RoleLoad(Struct, frozen=True):
    """The load of an instance that serves. `worked_ns`: since it came up."""

    instance: InstanceId
    role: Role
    load_ppm: int
    worked_ns: int = 0


class LoadsSampled(Struct, frozen=True):
    """The loads of all instances; none if one of them is away, because the loads are not known then."""

    loads: tuple[RoleLoad, ...]


class RoleChanged(Struct, frozen=True):
    """The change that was wanted has been done, or refused."""


Event = LoadsSampled | RoleChanged


class RoleChange(Struct, frozen=True):
    """Answered by `RoleChanged`."""

    instance: InstanceId
    role: Role
    why: str


class RolePolicy:
    """The roles of a pool of prefill and decode instances."""

    def __init__(self) -> None:
        self._changing = False
        self._settled_ns: int | None = None  # nothing changes before
        self._short: Role | None = None
        self._since_ns = 0  # it has been short
        self._worked: deque[tuple[int, int]] = deque()  # when, and by all prefill instances
        self._prefills: tuple[InstanceId, ...] = ()  # whose work that is

    def on(self, event: Event, now_ns: int) -> list[RoleChange]:
        """Takes one event; returns what is to change: one instance at most, and none while another one does."""
        match event:
            case RoleChanged():
                self._changing, self._settled_ns = False, now_ns + SETTLED_NS
                self._short = None
            case LoadsSampled(loads):
                return self._on_loads(loads, now_ns)
        return []

    def _on_loads(self, loads: Sequence[RoleLoad], now_ns: int) -> list[RoleChange]:
        prefills = [load for load in loads if load.role is Role.PREFILL]
        decodes = [load for load in loads if load.role is Role.DECODE]
        self._note_work(prefills, now_ns)
        if self._changing or (self._settled_ns is not None and now_ns < self._settled_ns):
            return []
        short = self._short_role(prefills, decodes)
        if short is not self._short:
            self._short, self._since_ns = short, now_ns
        if short is None or now_ns - self._since_ns < HELD_NS:
            return []
        if short is Role.DECODE and not _can_spare(prefills, self._worked_ppm()):
            return []
        takes, gives = (prefills, decodes) if short is Role.PREFILL else (decodes, prefills)
        chosen = min(gives, key=lambda load: (load.load_ppm, load.instance))
        self._changing = True
        why = f"{short} is loaded {_percent(takes)} %, {chosen.role} {_percent(gives)} %"
        return [RoleChange(chosen.instance, short, why)]

    def _short_role(self, prefills: Sequence[RoleLoad], decodes: Sequence[RoleLoad]) -> Role | None:
        if not prefills or not decodes:
            return None
        if _is_short(prefills) and _can_spare(decodes, _total(decodes)):
            return Role.PREFILL
        if _is_short(decodes) and _can_spare(prefills, _total(prefills)):
            return Role.DECODE
        return None

    def _note_work(self, prefills: Sequence[RoleLoad], now_ns: int) -> None:
        names = tuple(sorted(load.instance for load in prefills))
        if names != self._prefills:
            self._prefills = names
            self._worked.clear()
        self._worked.append((now_ns, sum(load.worked_ns for load in prefills)))
        while len(self._worked) > 2 and now_ns - self._worked[1][0] >= HELD_NS:
            self._worked.popleft()

    def _worked_ppm(self) -> int:
        """Of the time of one instance, by all prefill instances of late; all they have where that is not known."""
        (first_ns, before_ns), (last_ns, now_ns) = self._worked[0], self._worked[-1]
        if last_ns - first_ns < HELD_NS:
            return PPM * len(self._prefills)
        return PPM * max(now_ns - before_ns, 0) // (last_ns - first_ns)


def _total(loads: Sequence[RoleLoad]) -> int:
    return sum(load.load_ppm for load in loads)


def _percent(loads: Sequence[RoleLoad]) -> int:
    return _total(loads) * 100 // (PPM * len(loads))


def _is_short(loads: Sequence[RoleLoad]) -> bool:
    return _total(loads) > SHORT_PPM * len(loads)


def _can_spare(loads: Sequence[RoleLoad], total_ppm: int) -> bool:
    return len(loads) > 1 and total_ppm < SPARE_PPM * (len(loads) - 1)
