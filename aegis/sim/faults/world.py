"""A small world for the cores: the real session, prefill, decode, lease, arbiter and cache cores, played from one seed.

Durations, arrivals, cancellations, deaths and removals of models are drawn by chance, further faults are planned
(`aegis.sim.faults.plan`); instances are `aegis.sim.faults.node`s.

The proxy and the node are one sender, as they are in one process, or two: then what they tell an instance comes in any
order, as does what it tells them, and the proxy learns later than the node what instances and models there are.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from aegis.core.effects import StreamName
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, RequestId
from aegis.core.messages import (
    FromInstance,
    GaveBack,
    GrantSlabs,
    ImageEvicted,
    ImageUnreadable,
    ModelAdded,
    ModelDropped,
    ModelFailed,
    ModelUnloaded,
    NeedPages,
    Submit,
    ToInstance,
)
from aegis.core.request import Job, Sampling
from aegis.core.role import Role
from aegis.sim.faults.models import Models
from aegis.sim.faults.neighbour import Neighbour
from aegis.sim.faults.node import Node
from aegis.sim.faults.pretended import END_TOKEN, PAGE
from aegis.sim.faults.scenario import Scenario
from aegis.sim.faults.state import Action, FaultWorldState
from decode.core import DecodeCore
from decode.sequences import Counters
from memory.budget import Budget
from memory.host_kv import Answers, ForHost, HostKv
from memory.ledger import Ledger
from memory.page_arbiter import ArbiterEffect, PageArbiter, Settled, WipeLost
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
    RequestArrived,
    To,
)
from proxy.routing.router import Router

ForTheNode = (
    ForHost
    | NeedPages
    | GaveBack
    | ModelAdded
    | ModelFailed
    | ModelDropped
    | ModelUnloaded
    | ImageEvicted
    | ImageUnreadable
)
"""The rest is for the proxy."""


def _nothing() -> None:
    pass


def _role(instance: InstanceId) -> Role:
    return Role(instance.partition("-")[0])


class World:
    """`run` plays what was scheduled to its end and checks every law after every event."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        plan = scenario.plan
        self.delivered: defaultdict[RequestId, list[int]] = defaultdict(list)
        self.ended: dict[RequestId, Ended] = {}
        self.jobs: dict[RequestId, Job] = {}
        self.satisfied: set[RequestId] = set()  # whose clients left with all they wanted
        self.nodes: dict[InstanceId, Node] = {}
        self.lost: list[Node] = []
        self.settled: dict[int, Settled] = {}
        self.hopeless = False  # no instance of some role is left
        self.ground = FaultWorldState(
            seed,
            jitter_ns=scenario.jitter_ns,
            failing_share=max(scenario.failing_share, plan.failing_share),
            unreadable_share=plan.unreadable_share,
        )
        self._next_word = 0
        self._known: dict[InstanceId, Node] = {}  # to the proxy
        self.neighbours: dict[InstanceId, Neighbour] = {}
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
        policy = scenario.policy
        self.session = Router(
            scenario.prefill,
            policy,
            Hardware(),
            max_batch=policy.rules.max_batch,
            give_up_ns=scenario.give_up_ns,
        )
        self.host = HostKv(scenario.host_slabs, PAGE, lambda model: self.models.specs.get(model))
        self.leases = self.host.leases
        self.ground.kept = self.host.kept.held
        self.arbiter = PageArbiter(
            scenario.pages, idle_ns=scenario.idle_ns, patience_ns=scenario.patience_ns, quantum=1
        )
        self.models = Models(self, self.ground, self.budget, extents=scenario.cache_extents, parted=plan.parted)
        for spec in scenario.specs:
            limit = self.budget.sequence_tokens(spec.manifest.image_bytes, spec.manifest.kv)
            assert limit >= scenario.prompt_max + scenario.output_max, f"{spec.model} holds {limit} tokens only"
            self.models.register(spec)
        for name in self._expected:
            self._bring_up(name)

    @property
    def log(self) -> list[str]:
        return self.ground.log

    @property
    def readded(self) -> int:
        return self.models.readded

    def schedule(self) -> int:
        """All requests, deaths and removals; returns until when there are any."""
        scenario, ground = self.scenario, self.ground
        draw, at_ns = ground.draw, 0
        for index in range(scenario.requests):
            at_ns += draw.below(scenario.gap_ns)
            ground.after(at_ns, self._arrival(RequestId(index + 1)))
        span_ns = at_ns + 50_000_000
        for _ in range(scenario.deaths):
            ground.after(draw.below(span_ns), self._death)
        for _ in range(scenario.removals + scenario.plan.removals):
            ground.after(draw.below(span_ns), self.models.remove)
        for unload in scenario.plan.unloads:
            ground.after(unload.at_ns, partial(self.models.unload, unload.victim))
        return span_ns

    def run(self) -> None:
        self.ground.run()
        for _ in range(3):  # idle instances give everything back
            self._look()
            self.ground.after(self.scenario.idle_ns, self._look)
            self.ground.run()

    def decode_counters(self) -> list[Counters]:
        """The counters of all decode instances there ever were."""
        return [node.core.counters for node in [*self.lost, *self.nodes.values()] if isinstance(node.core, DecodeCore)]

    # --- requests -----------------------------------------------------------------------------------------------------

    def _arrival(self, request: RequestId) -> Action:
        draw, scenario = self.ground.draw, self.scenario
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
            job = Job(request, 1, spec.model, prompt, sampling, self.ground.now_ns, priority=priority)
            self.jobs[request] = job
            self.models.use(spec.model)
            self.tell(RequestArrived(job))
            if leaves:
                self.ground.after(delay_ns, lambda: self._leave(request))

        return arrive

    def _as_others(self, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """It differs from some others in its last tokens only."""
        which = self.ground.draw.below(self.scenario.alike)
        same = max(len(prompt) - self.ground.draw.below(8), 0)
        begin = tuple(which * 7 + at * at % 43 for at in range(same))
        return begin + prompt[same:]

    def _leave(self, request: RequestId) -> None:
        """A client with an odd number of tokens has all that it wanted."""
        if request not in self.ended and len(self.delivered[request]) % 2:
            self.satisfied.add(request)
        self.tell(ClientLeft(request, satisfied=request in self.satisfied))

    # --- instances come and go ----------------------------------------------------------------------------------------

    def up(self) -> list[InstanceId]:
        """As the node knows."""
        return sorted(self.nodes)

    def _death(self) -> None:
        """Noticed at once."""
        if self.nodes:
            name = self.up()[self.ground.draw.below(len(self.nodes))]
            self.crash(name, unnoticed_ns=0, absent_ns=self.ground.draw.below(20_000_000), for_good=False)

    def crash(self, instance: InstanceId, *, unnoticed_ns: int, absent_ns: int, for_good: bool) -> None:
        node = self.nodes[instance]
        if not node.alive:
            return
        self.ground.note(f"{instance} dies")
        node.alive = False
        notice = partial(self._notice, node, absent_ns, for_good)
        if unnoticed_ns:
            self.ground.after(unnoticed_ns, notice)
        else:
            notice()

    def _notice(self, node: Node, absent_ns: int, for_good: bool) -> None:
        """Messages of the lost instance that were not heard are lost. The others learn of the loss only when the proxy
        knows: otherwise their messages, and their use of KV that is not coming, would be taken for good."""
        self.ground.note(f"{node.instance} is lost")
        del self.nodes[node.instance]
        self.lost.append(node)
        self.inform(InstanceDown(node.instance), lambda: self._noted(partial(self._part, node, absent_ns, for_good)))

    def _noted(self, action: Action) -> None:
        if self.scenario.plan.parted:
            self.ground.send("proxy to node", action)
        else:
            action()

    def _part(self, node: Node, absent_ns: int, for_good: bool) -> None:
        self.forget(node.instance, tuple(node.words.values()))
        self.models.lost(node.instance)
        for word in node.words.values():
            self.ground.poison(word)
        self._moved()
        then = self._give_up if for_good else self._bring_up
        self.ground.after(absent_ns, lambda: then(node.instance))

    def forget(self, instance: InstanceId, words: tuple[int, ...]) -> None:
        """All memory that it had belongs to others."""
        self._answer(self.host.lost(instance, words))
        self.arbitrate(self.arbiter.lost(instance))

    def _give_up(self, instance: InstanceId) -> None:
        """The instance does not come up any more. If none of its role is left, no request is served."""
        self._expected.remove(instance)
        self.inform(InstanceDown(instance, for_good=True), self._abandon)

    def _abandon(self) -> None:
        if {_role(name) for name in self._expected} != self._roles:
            self.hopeless = True
            for request in list(self.session.states()):
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
                instance, ledger, self.scenario.policy, Hardware(), reuses=self.scenario.reuses
            )
        plan = self.scenario.plan
        self.nodes[instance] = Node(
            self.ground,
            instance,
            core,
            words,
            hear=self._say,
            moved=self._moved,
            parted=plan.parted,
            slowness=plan.slowness,
        )
        self.host.join(instance)
        self.arbiter.join(instance)
        self.models.join(instance)

    def _moved(self) -> None:
        for _, node in sorted(self.nodes.items()):
            node.pump()

    # --- messages -----------------------------------------------------------------------------------------------------

    def post(self, instance: InstanceId, message: ToInstance) -> None:
        """To an instance, or to a neighbour; from the node."""
        if neighbour := self.neighbours.get(instance):
            self.ground.send(f"to {instance}", lambda: neighbour.told(message))
        elif node := self.nodes.get(instance):
            self._send("node", node, message)

    def inform(self, event: Event, after: Action = _nothing) -> None:
        """The proxy, of something the node knows; then it does something else."""
        node = self.nodes.get(event.instance) if isinstance(event, InstanceUp) else None
        if isinstance(event, InstanceUp) and node is None:
            return  # it is lost: it only lacked a removed model, and no instance comes up any more

        def told() -> None:
            if node:
                self._known[node.instance] = node
            elif isinstance(event, InstanceDown):
                self._known.pop(event.instance, None)
            self.tell(event)
            after()

        if self.scenario.plan.parted:
            self.ground.send("node to proxy", told)
        else:
            told()

    def tell(self, event: Event) -> None:
        """The session core, and does what it asks for."""
        for effect in self.session.on(event, self.ground.now_ns):
            match effect:
                case To(instance, Submit() as submit) if self.scenario.reuses:
                    self._send("proxy", self._known[instance], self.host.looked_up(submit))
                case To(instance, message):
                    self._send("proxy", self._known[instance], message)
                case Deliver(request, first, tokens):
                    assert request not in self.ended, f"{request} has ended, and more is delivered"
                    assert first == len(self.delivered[request]), f"tokens of {request} are lost, or come twice"
                    self.delivered[request] += [token.id for token in tokens]
                case Ended():
                    assert effect.request not in self.ended, f"{effect.request} ends twice"
                    self.ended[effect.request] = effect

    def _send(self, sender: str, node: Node, message: ToInstance) -> None:
        """To this process: what comes after its end is lost."""
        link = f"{sender} to {node.instance}" if self.scenario.plan.parted else f"to {node.instance}"
        self.ground.send(link, lambda: node.receive(message))

    def _say(self, node: Node, message: FromInstance) -> None:
        to_node = isinstance(message, ForTheNode)
        link = f"from {node.instance}"
        if self.scenario.plan.parted:
            link += " to node" if to_node else " to proxy"

        def arrive() -> None:
            known = self.nodes if to_node else self._known
            if known.get(node.instance) is not node:
                return
            if to_node:
                self.hear(node.instance, message)
            else:
                self._look()
                self.tell(MessageReceived(node.instance, message))

        self.ground.send(link, arrive)

    def hear(self, instance: InstanceId, message: FromInstance) -> None:
        """The node does."""
        self._look()
        match message:
            case NeedPages():
                self.arbitrate(self.arbiter.ask(instance, message))
            case GaveBack():
                self.arbitrate(self.arbiter.gave_back(instance, message))
            case ModelAdded(model):
                self.models.added(instance, model)
            case ModelDropped(model):
                self.models.dropped(instance, model)
            case ModelUnloaded(model):
                self.models.unloaded(instance, model)
            case ImageEvicted(model):
                self.models.evicted(instance, model)
            case ImageUnreadable(model):
                self.models.unreadable(model)
            case message if isinstance(message, ForHost):
                self._answer(self.host.on_message(instance, message))

    # --- memory -------------------------------------------------------------------------------------------------------

    def _answer(self, answers: Answers) -> None:
        self.host.check()
        for instance, message in answers:
            if isinstance(message, GrantSlabs):
                self.ground.lease(message.slabs)
            self.post(instance, message)

    def arbitrate(self, effects: list[ArbiterEffect]) -> None:
        self.arbiter.check()
        for effect in effects:
            match effect:
                case WipeLost(key, runs):
                    self.ground.after(1_000_000, partial(self._wiped, key, runs))
                case Settled(command):
                    assert command not in self.settled
                    self.settled[command] = effect
                case (instance, message):
                    self.post(instance, message)

    def _wiped(self, key: str, runs: Runs) -> None:
        for page in (page for run in runs for page in range(run.start, run.stop)):
            self.ground.pages.pop(page, None)
            self.ground.dirty.discard(page)
        self.arbitrate(self.arbiter.wiped(key))

    def _look(self) -> None:
        """The idle instances, as telemetry would report them."""
        now_ns = self.ground.now_ns
        for name, node in self.nodes.items():
            self.arbiter.seen(name, busy=node.core.queued + node.core.running > 0, now_ns=now_ns)
        effects = self.arbiter.tick(now_ns)
        if effects:
            self.arbitrate(effects)
