"""The owner of the accounts of a device's pages: which instance holds which of them (Prism §5, ballooning).

An instance asks rarely, for many pages, and allocates them on its own. A request that cannot be granted is refused at
once and remembered. An urgent request, without which its instance stands still, is served strictly in order of asking,
and other instances are asked to give pages back for it: idle ones first, then those above an equal share, then any. If
two instances ask for the same page, one gets it and the other waits; neither fails. An instance with a crowded request,
without which a turn leaves requests out, is entitled to an equal share. An idle instance is trimmed to its floor.

Sans-I/O: every method returns effects. Instances answer each `TakeBack` once. The pages of one that dies go back, and
those that it may have written are wiped before any other instance gets them.

Laws: (A1) free + held + being wiped == capacity; (A2) an instance holds more than its limit only while it is asked to
give back; (A3) the first urgent request waits for lack of pages only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from aegis.core.errors import LawBroken
from aegis.core.ids import InstanceId, PageRun
from aegis.core.messages import GaveBack, GrantPages, NeedPages, TakeBack
from memory.pages import NoPages, PagePool, Runs

PATIENCE_NS: Final = 1_000_000_000
"""The time that an instance may take to give back pages that another one needs."""

TICK_NS: Final = 500_000_000
"""The interval at which arbiters are told that time passes."""


@dataclass(frozen=True, slots=True)
class WipeLost:
    """Zero these pages of a process that was lost, then say `wiped(key)`."""

    key: str
    runs: Runs


@dataclass(frozen=True, slots=True)
class Settled:
    """A command is done. `refused`: nothing was changed, and `pages` is what could have been given; else it is what was
    given."""

    command: int
    pages: int
    refused: bool = False


@dataclass(frozen=True, slots=True)
class InstanceUse:
    """One instance's part of a device. `limit` is the device's size if none was set; `requested` is 0 or the number of
    pages that it waits for."""

    held: int
    limit: int
    requested: int
    idle: bool


ArbiterEffect = tuple[InstanceId, GrantPages | TakeBack] | WipeLost | Settled


@dataclass(frozen=True, slots=True)
class _Limit:
    command: int
    pages: int
    patience_ns: int


@dataclass(frozen=True, slots=True)
class _Taking:
    """A firm `TakeBack` under way; for a limit, with the limit before."""

    number: int
    pages: int
    limit: _Limit | None = None
    before: int = 0


@dataclass(slots=True)
class _Member:
    limit: int
    taking: _Taking | None = None
    limits: deque[_Limit] = field(default_factory=deque)  # waiting for the one under way
    trims: dict[int, int | None] = field(default_factory=dict)  # numbers of gentle takings, with their commands
    spare: int = 0  # the pages that it could have given when it last refused
    idle_since_ns: int | None = None
    trimmed_ns: int = 0  # when time did so last
    kept: int = -1  # pages left by the last trim since it had work

    @property
    def giving(self) -> bool:
        return bool(self.taking or self.trims)


class PageArbiter:
    """The pages `[0, capacity)` of one device. Instances grow by at least `quantum` pages while no other one waits."""

    def __init__(
        self, capacity: int, *, floor: int = 0, idle_ns: int, patience_ns: int, quantum: int | None = None
    ) -> None:
        self.capacity = capacity
        self.floor = floor
        self._idle_ns = idle_ns
        self._patience_ns = patience_ns
        self._quantum = max(capacity // 16, 1) if quantum is None else quantum
        self._pool = PagePool([PageRun(0, capacity)])
        self._members: dict[InstanceId, _Member] = {}
        self._limits: dict[InstanceId, int] = {}  # of instances that were lost
        self._requests: dict[InstanceId, NeedPages] = {}  # in order of asking
        self._last_number = 0
        self._wiping = 0

    @property
    def free(self) -> int:
        return self._pool.free

    def held(self, instance: InstanceId) -> int:
        return self._pool.held(instance)

    def use(self) -> dict[InstanceId, InstanceUse]:
        """What each instance holds and wants. May be called from any thread."""
        return {
            name: InstanceUse(
                self.held(name), member.limit, self._request_of(name).count, member.idle_since_ns is not None
            )
            for name, member in list(self._members.items())
        }

    # --- instances come and go ----------------------------------------------------------------------------------------

    def join(self, instance: InstanceId) -> None:
        """A lost instance comes back with the limit it had."""
        assert instance not in self._members
        self._members[instance] = _Member(self._limits.pop(instance, self.capacity))

    def lost(self, instance: InstanceId) -> list[ArbiterEffect]:
        """The instance's process is gone, and with it every mapping of its pages."""
        member = self._members.pop(instance)
        self._requests.pop(instance, None)
        commands = [limit.command for limit in member.limits]
        commands += [command for command in member.trims.values() if command is not None]
        self._limits[instance] = member.limit
        if member.taking and member.taking.limit:
            commands.append(member.taking.limit.command)
            self._limits[instance] = member.taking.before
        effects: list[ArbiterEffect] = [Settled(command, 0, refused=True) for command in sorted(commands)]
        self._wiping += 1
        key = f"wiping {self._wiping}"
        runs = self._pool.transfer(instance, key)
        if runs:
            effects.append(WipeLost(key, runs))
        return effects + self._serve()

    def forget(self, instance: InstanceId) -> None:
        """A lost instance does not come back."""
        self._limits.pop(instance, None)

    def wiped(self, key: str) -> list[ArbiterEffect]:
        self._pool.give(key, self._pool.runs_of(key))
        return self._serve()

    # --- what instances say -------------------------------------------------------------------------------------------

    def ask(self, instance: InstanceId, request: NeedPages) -> list[ArbiterEffect]:
        """A new request replaces the instance's last one and keeps its place, unless only one of the two is urgent."""
        before = self._requests.get(instance)
        if before and before.urgent is not request.urgent:
            del self._requests[instance]
        if request.count:
            self._requests[instance] = request
        else:
            self._requests.pop(instance, None)
        effects = self._serve()
        if instance in self._requests:
            effects.append((instance, GrantPages((), refused=True, excessive=self._excessive(instance))))
        return effects

    def gave_back(self, instance: InstanceId, answer: GaveBack) -> list[ArbiterEffect]:
        member = self._members[instance]
        given = sum(run.pages for run in answer.runs)
        self._pool.give(instance, answer.runs)
        effects: list[ArbiterEffect] = []
        taking = member.taking
        if answer.number in member.trims:
            command = member.trims.pop(answer.number)
            member.kept = self.held(instance)
            effects += [] if command is None else [Settled(command, given)]
        else:
            assert taking and taking.number == answer.number
            member.taking, member.spare = None, answer.spare
            if taking.limit:
                if answer.refused:
                    member.limit = taking.before
                effects.append(Settled(taking.limit.command, answer.spare if answer.refused else given, answer.refused))
        return effects + self._next_limit(instance) + self._serve() + self._warn(instance)

    def seen(self, instance: InstanceId, *, busy: bool, now_ns: int) -> None:
        """Whether the instance has work."""
        member = self._members.get(instance)
        if member is None:
            return  # its report was on the way when it was lost
        if busy:
            member.idle_since_ns, member.kept = None, -1
        elif member.idle_since_ns is None:
            member.idle_since_ns = now_ns

    # --- what users and time ask --------------------------------------------------------------------------------------

    def set_limit(self, instance: InstanceId, pages: int, *, command: int, patience_ns: int) -> list[ArbiterEffect]:
        """Answered by `Settled` when the instance holds no more than that, or still does after `patience_ns`: then the
        limit is what it was."""
        assert 0 < pages <= self.capacity
        self._members[instance].limits.append(_Limit(command, pages, patience_ns))
        return self._next_limit(instance) + self._serve() + self._warn(instance)

    def trim(self, instance: InstanceId, *, keep: int | None = None, command: int | None = None) -> list[ArbiterEffect]:
        """Takes what the instance does not need now, down to `keep` pages or the floor; never refused."""
        number, least = self._new_number(), self.floor if keep is None else keep
        self._members[instance].trims[number] = command
        return [(instance, TakeBack(number, self.held(instance), self._patience_ns, gentle=True, keep=least))]

    def tick(self, now_ns: int) -> list[ArbiterEffect]:
        """Trims instances that have been idle for long enough; to be called now and then."""
        effects: list[ArbiterEffect] = []
        for instance, member in sorted(self._members.items()):
            since_ns = member.idle_since_ns
            if since_ns is None or member.giving or self.held(instance) <= self.floor:
                continue
            if now_ns - max(since_ns, member.trimmed_ns) >= self._idle_ns:
                member.trimmed_ns = now_ns
                effects += self.trim(instance)
        return effects

    # ------------------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises LawBroken if a law does not hold."""
        self._pool.check()
        if self._pool.capacity != self.capacity:
            raise LawBroken(f"A1: {self._pool.capacity} pages counted, {self.capacity} exist")
        for instance, member in self._members.items():
            if self.held(instance) > member.limit and member.taking is None:
                raise LawBroken(f"A2: {instance} holds {self.held(instance)} pages, its limit is {member.limit}")
        first = next(iter(self._urgent()), None)
        if first and self._requests[first].count <= self.free:
            raise LawBroken(f"A3: {self.free} pages are free, {first} waits for {self._requests[first].count}")

    def _urgent(self) -> Iterator[InstanceId]:
        """Instances that stand still and may grow so far, in order of asking."""
        return (
            name for name, request in self._requests.items() if request.urgent and self._within_limit(name, request)
        )

    def _request_of(self, instance: InstanceId) -> NeedPages:
        return self._requests.get(instance, NeedPages(0, urgent=False))

    def _within_limit(self, instance: InstanceId, request: NeedPages) -> bool:
        return self.held(instance) + request.count <= self._members[instance].limit

    def _excessive(self, instance: InstanceId) -> bool:
        """Whether the instance waits for pages that its limit forbids, while nothing is on its way back that would
        allow them."""
        request, member = self._requests.get(instance), self._members[instance]
        if request is None or not request.urgent or member.giving or member.limit == self.capacity:
            return False
        return not self._within_limit(instance, request)

    def _warn(self, instance: InstanceId) -> list[ArbiterEffect]:
        """Tells an instance whose request was refused that it has become hopeless."""
        return [(instance, GrantPages((), refused=True, excessive=True))] if self._excessive(instance) else []

    def _serve(self) -> list[ArbiterEffect]:
        effects: list[ArbiterEffect] = []
        for instance in list(self._urgent()):
            if self._requests[instance].count > self.free:
                return effects + self._take_for(instance)
            effects.append(self._grant(instance))
        for instance, request in list(self._requests.items()):
            if self._within_limit(instance, request):
                effects += [self._grant(instance)] if request.count <= self.free else self._request_spare(instance)
        return effects

    def _grant(self, instance: InstanceId) -> ArbiterEffect:
        count = self._requests.pop(instance).count
        if not self._requests:
            count = max(count, min(self._quantum, self.free, self._members[instance].limit - self.held(instance)))
        runs = self._pool.take(instance, count)
        assert not isinstance(runs, NoPages)
        return instance, GrantPages(runs)

    def _take_for(self, instance: InstanceId) -> list[ArbiterEffect]:
        """Asks others for the pages that the request lacks and that no instance was asked for yet."""
        missing = self._missing(self._requests[instance])
        share = self.capacity // len(self._members)
        others = [name for name, member in self._members.items() if name != instance and not member.giving]
        idle = {name: self._members[name].idle_since_ns is not None for name in others}
        asked = dict.fromkeys(others, 0)
        for least in (share, 0):
            for name in sorted(others, key=lambda name: (not idle[name], -self.held(name), name)):
                more = min(missing, self.held(name) - asked[name] - (0 if idle[name] else least))
                if more > 0:
                    asked[name] += more
                    missing -= more
        return [self._take(name, pages) for name, pages in asked.items() if pages]

    def _request_spare(self, instance: InstanceId) -> list[ArbiterEffect]:
        """Asks others for pages that they do not need: idle ones and, if the asking instance has less than an equal
        share, those that have more than one. For a crowded request the latter have to give even pages that they need.
        """
        request, share = self._requests[instance], self.capacity // len(self._members)
        poor = self.held(instance) + request.count <= share
        missing = self._missing(request)
        effects: list[ArbiterEffect] = []
        for name, member in self._members.items():
            keep = 0 if member.idle_since_ns is not None else share if poor else self.capacity
            if name == instance or member.giving or self.held(name) <= keep:
                continue
            if self.held(name) != member.kept:
                effects += self.trim(name, keep=keep)
            elif request.crowded and poor and missing > 0:
                effects.append(self._take(name, min(missing, self.held(name) - keep)))
                missing = self._missing(request)
        return effects

    def _missing(self, request: NeedPages) -> int:
        """The pages that are neither free nor asked back."""
        coming = sum(member.taking.pages for member in self._members.values() if member.taking)
        return request.count - self.free - coming

    def _take(self, instance: InstanceId, pages: int) -> ArbiterEffect:
        """An instance that could not give as many pages last time is asked for the number that it reported."""
        member = self._members[instance]
        pages = min(pages, member.spare or pages)
        member.spare = 0
        member.taking = _Taking(self._new_number(), pages)
        return instance, TakeBack(member.taking.number, pages, self._patience_ns)

    def _next_limit(self, instance: InstanceId) -> list[ArbiterEffect]:
        member = self._members[instance]
        effects: list[ArbiterEffect] = []
        while member.limits and not member.giving:
            limit = member.limits.popleft()
            before, member.limit = member.limit, limit.pages
            excess = self.held(instance) - limit.pages
            if excess <= 0:
                effects.append(Settled(limit.command, 0))
                continue
            member.taking = _Taking(self._new_number(), excess, limit, before)
            effects.append((instance, TakeBack(member.taking.number, excess, limit.patience_ns)))
        return effects

    def _new_number(self) -> int:
        self._last_number += 1
        return self._last_number
