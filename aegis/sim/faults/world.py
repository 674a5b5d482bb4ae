"""The simulated world that checks contents: the cores that serve, with everything going wrong by chance from one seed.

Durations, arrivals, cancellations, deaths and removals of models are drawn by chance, further faults are planned
(`aegis.sim.faults.plan`); instances are `aegis.sim.faults.instance`s, whose memory has contents.

The proxy and the node are one sender, as they are in one process, or two: then what they tell an instance comes in any
order, as does what it tells them, and the proxy learns later than the node what instances and models there are.

What it shares with the world that measures time, and why there are two, is said in `aegis.sim.market`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from aegis.core.effects import StreamName
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, RequestId
from aegis.core.messages import (
    FromInstance,
    GrantSlabs,
    ToInstance,
)
from aegis.core.request import Job, Sampling
from aegis.core.role import Role
from aegis.core.views import Work
from aegis.sim.effects import RouterEffects
from aegis.sim.faults.fake_models import END_TOKEN, PAGE
from aegis.sim.faults.instance import FaultyInstance
from aegis.sim.faults.model_catalogue import ModelCatalogue
from aegis.sim.faults.noisy_neighbour import NoisyNeighbour
from aegis.sim.faults.scenario import Scenario
from aegis.sim.faults.state import Action, FaultWorldState
from aegis.sim.node_memory import FOR_NODE, NodeEffect, NodeMemory
from decode.core import DecodeCore
from decode.counters import Counters
from decode.second_lane import LaneOffers
from memory.budget import Budget
from memory.ledger import Ledger
from memory.page_arbiter import PageArbiter, Settled, WipeLost
from memory.pages import Runs
from prefill.core import PrefillCore
from proxy.routing.events import (
    ClientLeft,
    Deliver,
    Ended,
    Event,
    InstanceDown,
    InstanceUp,
    MessageReceived,
    ModelMoved,
    RequestArrived,
)
from proxy.routing.router import Router


def _nothing() -> None:
    pass


def _role(instance: InstanceId) -> Role:
    return Role(instance.partition("-")[0])


class World:
    """`run` plays what was scheduled to its end and checks every law after every event. So many `moves` of models
    have begun and not ended."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        plan = scenario.plan
        self.delivered: defaultdict[RequestId, list[int]] = defaultdict(list)
        self.ended: dict[RequestId, Ended] = {}
        self.jobs: dict[RequestId, Job] = {}
        self.satisfied: set[RequestId] = set()  # whose clients left with all they wanted
        self.instances: dict[InstanceId, FaultyInstance] = {}
        self.lost: list[FaultyInstance] = []
        self.settled: dict[int, Settled] = {}
        self.hopeless = False  # no instance of some role is left
        self.state = FaultWorldState(
            seed,
            jitter_ns=scenario.jitter_ns,
            failing_share=max(scenario.failing_share, plan.failing_share),
            unreadable_share=plan.unreadable_share,
        )
        self._next_word = self.moves = 0
        self._known: dict[InstanceId, FaultyInstance] = {}  # to the proxy
        self.neighbours: dict[InstanceId, NoisyNeighbour] = {}
        counts = {Role.PREFILL: scenario.prefills, Role.DECODE: scenario.decodes, Role.MIXED: scenario.mixed}
        self._expected = [InstanceId(f"{role}-{i}") for role, count in counts.items() for i in range(count)]
        self.budget = Budget(
            pages=scenario.pages,
            page_bytes=PAGE,
            slab_bytes=PAGE,
            host_slabs=scenario.host_slabs,
            instances=len(self._expected),
        )
        self._roles = {_role(name) for name in self._expected}
        self.router = Router(
            scenario.prefill,
            scenario.policy,
            Hardware(),
            max_batch=scenario.policy.rules.max_batch,
            give_up_ns=scenario.give_up_ns,
        )
        self.arbiter = PageArbiter(
            scenario.pages, idle_ns=scenario.idle_ns, patience_ns=scenario.patience_ns, quantum=1
        )
        self.models = ModelCatalogue(self, self.state, self.budget, extents=scenario.cache_extents, parted=plan.parted)
        self.memory = NodeMemory(scenario.host_slabs, PAGE, self.models.specs.get, self.models)
        self._router_effects = RouterEffects(
            self.router,
            self.memory.host if scenario.reuses else None,
            send=lambda instance, message: self._send("proxy", self._known[instance], message),
            ended=self._ended,
            deliver=self._deliver,
            moved=self._moved,
        )
        self._begin()

    def _begin(self) -> None:
        """All models and instances."""
        for spec in self.scenario.specs:
            limit = self.budget.sequence_tokens(spec.manifest.image_bytes, spec.manifest.kv)
            longest = self.scenario.prompt_max + self.scenario.output_max
            assert limit >= longest, f"{spec.model} holds {limit} tokens only"
            self.models.register(spec)
        for name in self._expected:
            self._bring_up(name)

    @property
    def log(self) -> list[str]:
        return self.state.log

    @property
    def readded(self) -> int:
        return self.models.readded

    def schedule(self) -> int:
        """All requests, deaths and removals; returns until when there are any."""
        scenario, state = self.scenario, self.state
        draw, at_ns = state.draw, 0
        for index in range(scenario.requests):
            at_ns += draw.below(scenario.gap_ns)
            state.after(at_ns, self._arrival(RequestId(index + 1)))
        span_ns = at_ns + 50_000_000
        for _ in range(scenario.deaths):
            state.after(draw.below(span_ns), self._death)
        for _ in range(scenario.removals + scenario.plan.removals):
            state.after(draw.below(span_ns), self.models.remove)
        for unload in scenario.plan.unloads:
            state.after(unload.at_ns, partial(self.models.unload, unload.victim))
        return span_ns

    def run(self) -> None:
        self.state.run()
        for _ in range(3):  # idle instances give everything back
            self._look()
            self.state.after(self.scenario.idle_ns, self._look)
            self.state.run()

    def decode_counters(self) -> list[Counters]:
        """The counters of all decode instances there ever were."""
        cores = [process.core for process in [*self.lost, *self.instances.values()]]
        return [core.counters for core in cores if isinstance(core, DecodeCore)]

    # --- requests -----------------------------------------------------------------------------------------------------

    def _arrival(self, request: RequestId) -> Action:
        draw, scenario = self.state.draw, self.scenario
        spec = scenario.specs[draw.below(len(scenario.specs))]
        prompt = tuple(draw.below(50) for _ in range(1 + draw.below(scenario.prompt_max)))
        if scenario.alike:
            prompt = self._as_others(prompt)
        sampling = Sampling(max_tokens=1 + draw.below(scenario.output_max), stop_token_ids=(END_TOKEN,))
        leaves = draw.uniform() < max(scenario.cancel_share, scenario.plan.leaving_share)
        delay_ns = draw.below(100_000_000)
        most = scenario.priority_max
        priority = draw.below(2 * most + 1) - most if most else 0

        def arrive() -> None:
            if spec.model not in self.models.specs or self.hopeless:
                return  # refused at the door
            base, adapter = (spec.base, spec.model) if spec.base else (spec.model, None)
            work, now_ns = Work(base, len(prompt)), self.state.now_ns
            if scenario.refuses and self.router.admission.late_ns(work, priority, now_ns) is not None:
                return
            job = Job(request, 1, base, prompt, sampling, now_ns, priority=priority, adapter=adapter)
            self.jobs[request] = job
            self.models.use(spec.model)
            self.models.use(base)
            self.tell(RequestArrived(job, refusable=scenario.refuses))
            if leaves:
                self.state.after(delay_ns, lambda: self._leave(request))

        return arrive

    def _as_others(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """It differs from some others in its last tokens only."""
        which = self.state.draw.below(self.scenario.alike)
        same = max(len(prompt) - self.state.draw.below(8), 0)
        begin = tuple(which * 7 + at * at % 43 for at in range(same))
        return begin + prompt[same:]

    def _leave(self, request: RequestId) -> None:
        """Every client that has an odd number of tokens has all that it wanted."""
        if request not in self.ended and len(self.delivered[request]) % 2:
            self.satisfied.add(request)
        self.tell(ClientLeft(request, satisfied=request in self.satisfied))

    # --- instances come and go ----------------------------------------------------------------------------------------

    def up(self) -> list[InstanceId]:
        """As the node knows."""
        return sorted(self.instances)

    def _death(self) -> None:
        """Noticed at once."""
        if self.instances:
            name = self.up()[self.state.draw.below(len(self.instances))]
            self.crash(name, unnoticed_ns=0, absent_ns=self.state.draw.below(20_000_000), for_good=False)

    def crash(self, instance: InstanceId, *, unnoticed_ns: int, absent_ns: int, for_good: bool) -> None:
        process = self.instances[instance]
        if not process.alive:
            return
        self.state.note(f"{instance} dies")
        process.alive = False
        notice = partial(self._notice, process, absent_ns, for_good)
        if unnoticed_ns:
            self.state.after(unnoticed_ns, notice)
        else:
            notice()

    def _notice(self, process: FaultyInstance, absent_ns: int, for_good: bool) -> None:
        """Messages of the lost instance that have not been heard are lost. The other instances learn of the loss only
        when the proxy knows it: before that, it would take for good what they say, and their use of KV that is not
        coming."""
        self.state.note(f"{process.instance} is lost")
        del self.instances[process.instance]
        self.lost.append(process)
        self.inform(
            InstanceDown(process.instance), lambda: self._noted(partial(self._part, process, absent_ns, for_good))
        )

    def _noted(self, action: Action) -> None:
        if self.scenario.plan.parted:
            self.state.send("proxy to node", action)
        else:
            action()

    def _part(self, process: FaultyInstance, absent_ns: int, for_good: bool) -> None:
        self.forget(process.instance, tuple(process.words.values()))
        self.models.lost(process.instance)
        for word in process.words.values():
            self.state.poison(word)
        then = self._give_up if for_good else self._bring_up
        self.state.after(absent_ns, lambda: then(process.instance))

    def forget(self, instance: InstanceId, words: tuple[int, ...]) -> None:
        """All memory that it had belongs to others."""
        self.perform(self.memory.lost(instance, words))

    def _give_up(self, instance: InstanceId) -> None:
        """The instance does not come up any more. If none of its role is left, no request is served."""
        self._expected.remove(instance)
        self.inform(InstanceDown(instance, for_good=True), self._abandon)

    def _abandon(self) -> None:
        if {_role(name) for name in self._expected} != self._roles:
            self.hopeless = True
            for request in list(self.router.states()):
                self.tell(ClientLeft(request))

    def _bring_up(self, instance: InstanceId) -> None:
        words = {name: self._next_word + i for i, name in enumerate(StreamName)}
        self._next_word += len(words)
        ledger = Ledger(self.budget, words, address_pages=1 << 20)
        core: PrefillCore | DecodeCore
        if instance.startswith("prefill"):
            core = self.scenario.prefill_core(instance, ledger, self.scenario.order, reuses=self.scenario.reuses)
        else:
            core = self.scenario.decode_core(
                instance,
                ledger,
                self.scenario.policy,
                Hardware(),
                reuses=self.scenario.reuses,
                lanes=LaneOffers(self.scenario.lane_shares),
            )
        plan = self.scenario.plan
        self.instances[instance] = FaultyInstance(
            self.state,
            instance,
            core,
            words,
            hear=self._say,
            parted=plan.parted,
            slowness=plan.slowness,
        )
        self.memory.join(instance, self.arbiter)
        self.models.join(instance)

    # --- messages -----------------------------------------------------------------------------------------------------

    def post(self, instance: InstanceId, message: ToInstance) -> None:
        """To an instance, or to a neighbour; from the node."""
        if neighbour := self.neighbours.get(instance):
            self.state.send(f"to {instance}", lambda: neighbour.told(message))
        elif process := self.instances.get(instance):
            self._send("node", process, message)

    def inform(self, event: Event, after: Action = _nothing) -> None:
        """The proxy, of something the node knows; then it does something else."""
        process = self.instances.get(event.instance) if isinstance(event, InstanceUp) else None
        if isinstance(event, InstanceUp) and process is None:
            return  # it is lost: it only lacked a removed model, and no instance comes up any more

        def told() -> None:
            if process:
                self._known[process.instance] = process
            elif isinstance(event, InstanceDown):
                self._known.pop(event.instance, None)
            self.tell(event)
            after()

        if self.scenario.plan.parted:
            self.state.send("node to proxy", told)
        else:
            told()

    def tell(self, event: Event) -> None:
        """The router, and does what it asks for."""
        self._router_effects.tell(event, self.state.now_ns)

    def _deliver(self, effect: Deliver) -> None:
        request = effect.request
        assert request not in self.ended, f"{request} has ended, and more is delivered"
        assert effect.first == len(self.delivered[request]), f"tokens of {request} are lost, or come twice"
        self.delivered[request] += [token.id for token in effect.tokens]

    def _moved(self, _: ModelMoved) -> None:
        assert self.moves, "a move ends twice"
        self.moves -= 1

    def _ended(self, effect: Ended) -> None:
        assert effect.request not in self.ended, f"{effect.request} ends twice"
        self.ended[effect.request] = effect

    def _send(self, sender: str, process: FaultyInstance, message: ToInstance) -> None:
        """To this process: what comes after its end is lost."""
        link = f"{sender} to {process.instance}" if self.scenario.plan.parted else f"to {process.instance}"
        self.state.send(link, lambda: process.receive(message))

    def _say(self, process: FaultyInstance, message: FromInstance) -> None:
        to_node = type(message) in FOR_NODE
        link = f"from {process.instance}"
        if self.scenario.plan.parted:
            link += " to node" if to_node else " to proxy"

        def arrive() -> None:
            known = self.instances if to_node else self._known
            if known.get(process.instance) is not process:
                return
            if to_node:
                self.hear(process.instance, message)
            else:
                self._look()
                self.tell(MessageReceived(process.instance, message))

        self.state.send(link, arrive)

    def hear(self, instance: InstanceId, message: FromInstance) -> None:
        """The node does."""
        self._look()
        self.perform(self.memory.hear(instance, message, self.state.now_ns))

    # --- memory -------------------------------------------------------------------------------------------------------

    def perform(self, effects: Sequence[NodeEffect]) -> None:
        """What the accounts of the node's memory ask for. Raises LawBroken if a law of theirs does not hold."""
        self.memory.check()
        for effect in effects:
            match effect:
                case WipeLost(key, runs):
                    self.state.after(1_000_000, partial(self._wiped, key, runs))
                case Settled(command):
                    assert command not in self.settled
                    self.settled[command] = effect
                case (instance, message):
                    if isinstance(message, GrantSlabs):
                        self.state.lease(message.slabs)
                    self.post(instance, message)

    def _wiped(self, key: str, runs: Runs) -> None:
        for page in (page for run in runs for page in range(run.start, run.stop)):
            self.state.pages.pop(page, None)
            self.state.dirty.discard(page)
        self.perform(self.arbiter.wiped(key))

    def _look(self) -> None:
        """The idle instances, as telemetry would report them."""
        now_ns = self.state.now_ns
        for name, instance in self.instances.items():
            self.memory.seen(name, instance.core.queued + instance.core.running, now_ns)
        effects = self.memory.tick(now_ns)
        if effects:
            self.perform(effects)
