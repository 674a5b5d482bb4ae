"""One device, several instances with their real books: messages on their way, answers late, instances lost, limits
moved at any moment. Every law holds all the time; every taking and every command is answered once; in the end all is
free."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aegis.core.block_runs import block_ids, runs_of
from aegis.core.effects import MapKv, RevokePages, Send, StreamName, WipePages
from aegis.core.ids import BlockId, InstanceId
from aegis.core.messages import FromInstance, GaveBack, GrantPages, NeedPages, TakeBack, ToInstance
from aegis.sim.faults.fake_models import PAGE, make_shape
from memory.budget import Budget
from memory.ledger import Ledger
from memory.page_arbiter import ArbiterEffect, PageArbiter, Settled, WipeLost
from memory.pages import Runs
from memory.slab_pool import NoBlocks

PAGES, FLOOR, IDLE_NS, PATIENCE_NS = 12, 1, 60, 40
BUDGET = Budget(pages=PAGES, page_bytes=PAGE, slab_bytes=PAGE, host_slabs=4, instances=3)
SHAPE = make_shape(PAGE)  # a block fills a page
NAMES = [InstanceId(name) for name in ("decode-0", "prefill-0", "prefill-1")]
names = st.sampled_from(NAMES)
Page = int


def pages_of(runs: Runs) -> set[Page]:
    return {page for run in runs for page in range(run.start, run.stop)}


@dataclass
class Process:
    """An instance's books, and its mail in both directions."""

    ledger: Ledger = field(
        default_factory=lambda: Ledger(BUDGET, {name: i for i, name in enumerate(StreamName)}, address_pages=10)
    )
    used: list[BlockId] = field(default_factory=list)
    to: deque[ToInstance] = field(default_factory=deque)
    said: deque[FromInstance] = field(default_factory=deque)
    wipes: deque[set[Page]] = field(default_factory=deque)
    wiped: int = 0


@dataclass
class Command:
    """A limit, or with None a trim."""

    instance: InstanceId
    pages: int | None


class Device(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.arbiter = PageArbiter(PAGES, floor=FLOOR, idle_ns=IDLE_NS, patience_ns=PATIENCE_NS, quantum=2)
        self.processes: dict[InstanceId, Process] = {}
        self.owner: dict[Page, str] = {}  # as messages say
        self.written: set[Page] = set()
        self.requests: dict[InstanceId, NeedPages] = {}  # that wait, in order
        self.limits: dict[InstanceId, int] = {}
        self.takings: dict[int, tuple[InstanceId, TakeBack]] = {}  # unanswered
        self.commands: dict[int, Command] = {}  # unsettled
        self.lost: dict[str, Runs] = {}  # being wiped
        self.next_command = self.now_ns = 0
        for name in NAMES:
            self.join(name)

    # --- processes ----------------------------------------------------------------------------------------------------

    @rule(name=names)
    def join(self, name: InstanceId) -> None:
        if name not in self.processes:
            self.processes[name] = Process()
            self.limits.setdefault(name, PAGES)  # one that was lost comes back with the limit it had
            self.arbiter.join(name)

    @rule(name=names)
    def lose(self, name: InstanceId) -> None:
        if name not in self.processes:
            return
        del self.processes[name]
        self.requests.pop(name, None)
        self.takings = {number: taking for number, taking in self.takings.items() if taking[0] != name}
        mine = {command for command, what in self.commands.items() if what.instance == name}
        effects = self.arbiter.lost(name)
        refused = {e.command for e in effects if isinstance(e, Settled) and e.refused}
        assert refused >= mine, "what was asked of it cannot be done"
        held = {page for page, owner in self.owner.items() if owner == name}
        wiping = [e for e in effects if isinstance(e, WipeLost)]
        assert {page for e in wiping for page in pages_of(e.runs)} == held, "nobody gets them before they are wiped"
        self.perform(effects)

    @rule(data=st.data())
    def a_lost_ones_pages_are_wiped(self, data: st.DataObject) -> None:
        if self.lost:
            key = data.draw(st.sampled_from(sorted(self.lost)))
            self.wipe_lost(key)

    def wipe_lost(self, key: str) -> None:
        for page in pages_of(self.lost.pop(key)):
            self.written.discard(page)
            assert self.owner.pop(page) == key
        self.perform(self.arbiter.wiped(key))

    # --- what a process does ------------------------------------------------------------------------------------------

    @rule(name=names, count=st.integers(1, 6))
    def use(self, name: InstanceId, count: int) -> None:
        if process := self.processes.get(name):
            blocks = process.ledger.device.alloc(SHAPE, count)
            process.used += () if isinstance(blocks, NoBlocks) else block_ids(blocks)
            self.listen(process)

    @rule(name=names, count=st.integers(1, 6))
    def leave(self, name: InstanceId, count: int) -> None:
        if process := self.processes.get(name):
            process.ledger.device.free(SHAPE, runs_of(process.used[:count]))
            del process.used[:count]
            self.listen(process)

    @rule(name=names, count=st.integers(1, 8), urgent=st.booleans(), crowded=st.booleans())
    def want(self, name: InstanceId, count: int, urgent: bool, crowded: bool) -> None:
        if process := self.processes.get(name):
            more = min(count, PAGES - process.ledger.balloon.held)
            if more > 0:
                process.ledger.balloon.want(more, urgent=urgent, crowded=crowded)
            self.listen(process)

    @rule(name=names)
    def be_content(self, name: InstanceId) -> None:
        if process := self.processes.get(name):
            process.ledger.balloon.content()
            self.listen(process)

    @rule(name=names, ns=st.integers(0, 30))
    def settle(self, name: InstanceId, ns: int) -> None:
        self.now_ns += ns
        if process := self.processes.get(name):
            process.ledger.balloon.settle(self.now_ns)
            self.listen(process)

    @rule(name=names)
    def a_wipe_ends(self, name: InstanceId) -> None:
        process = self.processes.get(name)
        if process and process.wipes:
            self.written -= process.wipes.popleft()
            process.wiped += 1
            process.ledger.progress(StreamName.SCRUB, process.wiped)
            self.listen(process)

    def listen(self, process: Process) -> None:
        for effect in process.ledger.drain():
            match effect:
                case MapKv(_, runs):
                    self.written |= pages_of(runs)
                case WipePages(runs):
                    process.wipes.append(pages_of(runs))
                case RevokePages(runs):
                    assert not pages_of(runs) & self.written
                case Send(message):
                    process.said.append(message)

    # --- mail ---------------------------------------------------------------------------------------------------------

    @rule(name=names, count=st.integers(1, 4))
    def mail_arrives(self, name: InstanceId, count: int) -> None:
        for _ in range(count):
            self.hear(name)
            self.deliver(name)

    @rule(name=names)
    def deliver(self, name: InstanceId) -> None:
        process = self.processes.get(name)
        if not process or not process.to:
            return
        match process.to.popleft():
            case GrantPages() as grant:
                process.ledger.balloon.granted(grant)
            case TakeBack() as asked:
                process.ledger.balloon.take_back(asked, self.now_ns)
        self.listen(process)

    @rule(name=names)
    def hear(self, name: InstanceId) -> None:
        process = self.processes.get(name)
        if not process or not process.said:
            return
        match process.said.popleft():
            case NeedPages() as request:
                self.note(name, request)
                self.perform(self.arbiter.ask(name, request))
            case GaveBack() as answer:
                self.check_answer(name, answer)
                self.perform(self.arbiter.gave_back(name, answer))

    def note(self, name: InstanceId, request: NeedPages) -> None:
        """A request keeps its place, but for one that becomes urgent or is so no more."""
        before = self.requests.get(name)
        if before and before.urgent != request.urgent:
            del self.requests[name]
        self.requests[name] = request
        if not request.count:
            del self.requests[name]

    def check_answer(self, name: InstanceId, answer: GaveBack) -> None:
        asked_of, asked = self.takings.pop(answer.number)  # each is answered once
        given = pages_of(answer.runs)
        assert asked_of == name and len(given) <= asked.pages
        assert asked.gentle or len(given) == (0 if answer.refused else asked.pages), "all or none"
        for page in given:
            assert self.owner.pop(page) == name

    def perform(self, effects: list[ArbiterEffect]) -> None:
        for effect in effects:
            match effect:
                case WipeLost(key, runs):
                    self.lost[key] = runs
                    self.owner |= dict.fromkeys(pages_of(runs), key)
                case Settled():
                    self.settled(effect)
                case (name, TakeBack() as asked):
                    assert asked.number not in self.takings
                    self.takings[asked.number] = (name, asked)
                    self.processes[name].to.append(asked)
                case (name, GrantPages() as grant):
                    self.granted(name, grant)
                    self.processes[name].to.append(grant)

    def settled(self, effect: Settled) -> None:
        command = self.commands.pop(effect.command)  # once
        if command.pages is not None and not effect.refused:
            self.limits[command.instance] = command.pages
            use = self.arbiter.use()[command.instance]
            assert use.held <= max(command.pages, use.limit)  # a later limit may be under way or settled already

    def granted(self, name: InstanceId, grant: GrantPages) -> None:
        if grant.refused:
            assert name in self.requests and not grant.runs
            return
        request, pages = self.requests[name], pages_of(grant.runs)
        assert len(pages) >= request.count and not pages & self.owner.keys(), "no page is granted twice"
        assert not pages & self.written, "another one's bytes come into reach"
        for other, earlier in self.requests.items():
            if other == name and request.urgent:
                break
            fits = self.arbiter.held(other) + earlier.count <= self.arbiter.use()[other].limit
            assert other == name or not earlier.urgent or not fits, "urgent requests come first, in order of asking"
        del self.requests[name]
        self.owner |= dict.fromkeys(pages, name)

    # --- what users and time do ---------------------------------------------------------------------------------------

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), pages=st.integers(1, PAGES), patience_ns=st.integers(0, PATIENCE_NS))
    def set_limit(self, data: st.DataObject, pages: int, patience_ns: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.processes)))
        self.next_command += 1
        self.commands[self.next_command] = Command(name, pages)
        self.perform(self.arbiter.set_limit(name, pages, command=self.next_command, patience_ns=patience_ns))

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), keep=st.none() | st.integers(0, PAGES))
    def trim(self, data: st.DataObject, keep: int | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.processes)))
        self.next_command += 1
        self.commands[self.next_command] = Command(name, None)
        self.perform(self.arbiter.trim(name, keep=keep, command=self.next_command))

    @rule(name=names, busy=st.booleans(), ns=st.integers(0, 2 * IDLE_NS))
    def look(self, name: InstanceId, busy: bool, ns: int) -> None:
        self.now_ns += ns
        if name in self.processes:
            self.arbiter.seen(name, busy=busy, now_ns=self.now_ns)
        self.perform(self.arbiter.tick(self.now_ns))

    # --- what holds all the time --------------------------------------------------------------------------------------

    @invariant()
    def every_law_holds(self) -> None:
        self.arbiter.check()
        for process in self.processes.values():
            process.ledger.check()

    @invariant()
    def a_page_is_free_or_somebodys(self) -> None:
        assert self.arbiter.free == PAGES - len(self.owner)
        assert self.arbiter.use().keys() == self.processes.keys()
        for name, use in self.arbiter.use().items():
            held = {page for page, owner in self.owner.items() if owner == name}
            assert use.held == len(held) >= self.processes[name].ledger.balloon.held - self.coming(name)
            assert use.requested == (self.requests[name].count if name in self.requests else 0)

    def coming(self, name: InstanceId) -> int:
        return sum(len(pages_of(m.runs)) for m in self.processes[name].said if isinstance(m, GaveBack))

    def teardown(self) -> None:
        """Nobody uses anything any more, and all mail arrives."""
        for name, process in self.processes.items():
            self.leave(name, len(process.used))
        self.calm()
        assert not self.takings and not self.commands and not self.lost
        for name, use in self.arbiter.use().items():
            assert use.limit == self.limits[name]
            request = self.requests.get(name)
            if request and request.urgent and use.limit < PAGES:
                assert use.held + request.count > use.limit, "what stands still has what there is"
                assert self.processes[name].ledger.balloon.hopeless, "or is told that it never will"
        for _ in range(2):  # a request may be granted while it is being withdrawn
            for name in self.processes:
                self.perform(self.arbiter.trim(name, keep=0))
            self.calm()
        assert self.arbiter.free == PAGES and not self.owner and not self.written

    def calm(self) -> None:
        rounds = 0
        while self.lost or self.takings or any(p.to or p.said or p.wipes for p in self.processes.values()):
            rounds += 1
            assert rounds < 50, "it never comes to rest"
            for key in list(self.lost):
                self.wipe_lost(key)
            for name, process in self.processes.items():
                for _ in range(len(process.to)):
                    self.deliver(name)
                self.settle(name, 1)
                for _ in range(len(process.wipes)):
                    self.a_wipe_ends(name)
                for _ in range(len(process.said)):
                    self.hear(name)
            self.every_law_holds()


Device.TestCase.settings = settings(max_examples=120, stateful_step_count=50)
TestDevice = Device.TestCase
