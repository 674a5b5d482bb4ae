"""A small world for the cores: the real session, prefill, decode and lease cores, played from one seed.

Durations, arrivals, cancellations, deaths and removals of models are drawn by chance; instances are `tests.sim.node`s.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from aegis.core.effects import StreamName
from aegis.core.estimators import Hardware
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.lifecycle import State
from aegis.core.messages import (
    AddModel,
    DropModel,
    FromInstance,
    GaveBack,
    ModelDropped,
    NeedPages,
    NeedSlabs,
    PeerForgotten,
    ReturnSlabs,
    ToInstance,
)
from aegis.core.model import ModelSpec
from aegis.core.request import Job, Sampling
from aegis.core.role import Role
from aegis.core.views import PrefillOrder, PrefillPolicy
from aegis.policies import Policy
from decode.core import DecodeCore
from decode.policy import WeightedRoundRobin
from decode.sequences import Counters
from memory.arbiter import ArbiterEffect, PageArbiter, Settled, WipeLost
from memory.budget import Budget
from memory.leases import SlabLeases
from memory.ledger import Ledger
from memory.pages import Runs
from prefill.core import PrefillCore
from prefill.policy import GroupedFcfs
from proxy.events import (
    Arrived,
    ClientLeft,
    Deliver,
    Ended,
    Event,
    Heard,
    InstanceDown,
    InstanceUp,
    ModelGone,
    ModelUp,
    To,
)
from proxy.sessions import SessionCore
from tests.sim.ground import Action, Ground
from tests.sim.node import Node
from tests.sim.pretended import END_TOKEN, PAGE, reference

_POLICY = WeightedRoundRobin(30_000_000)
_GROUPED = GroupedFcfs()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Sizes of a run."""

    specs: tuple[ModelSpec, ...]
    pages: int  # of the device that all instances share
    host_slabs: int
    prefills: int = 1
    decodes: int = 1
    mixed: int = 0
    policy: Policy = _POLICY  # of decode and mixed instances
    prefill: PrefillPolicy = _GROUPED
    order: PrefillOrder | None = None
    decode_core: type[DecodeCore] = DecodeCore
    prefill_core: type[PrefillCore] = PrefillCore
    requests: int = 40
    deaths: int = 0
    removals: int = 0
    cancel_share: float = 0.1
    failing_share: float = 0.0  # of steps on which the engine raises
    gap_ns: int = 2_000_000
    jitter_ns: int = 0  # how much later than the fastest a message may come
    prompt_max: int = 120
    output_max: int = 80
    moves: int = 0  # of limits, drawn by chance
    priority_max: int = 0
    idle_ns: int = 20_000_000
    patience_ns: int = 40_000_000


class World:
    """`run` plays a scenario to its end and checks every law after every event."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.delivered: defaultdict[RequestId, list[int]] = defaultdict(list)
        self.ended: dict[RequestId, Ended] = {}
        self.jobs: dict[RequestId, Job] = {}
        self.nodes: dict[InstanceId, Node] = {}
        self.lost: list[Node] = []
        self.readded = 0
        self._ground = Ground(seed, jitter_ns=scenario.jitter_ns, failing_share=scenario.failing_share)
        self._next_word = 0
        counts = {Role.PREFILL: scenario.prefills, Role.DECODE: scenario.decodes, Role.MIXED: scenario.mixed}
        names = [f"{role}-{i}" for role, count in counts.items() for i in range(count)]
        self._budget = Budget(
            pages=scenario.pages, page_bytes=PAGE, slab_bytes=PAGE, host_slabs=scenario.host_slabs, instances=len(names)
        )
        policy = scenario.policy
        self.session = SessionCore(scenario.prefill, policy, Hardware(), max_batch=policy.rules.max_batch)
        self.leases = SlabLeases(scenario.host_slabs)
        self.arbiter = PageArbiter(
            scenario.pages, idle_ns=scenario.idle_ns, patience_ns=scenario.patience_ns, quantum=1
        )
        self.settled: dict[int, Settled] = {}
        self._models: dict[ModelId, ModelSpec] = {}
        self._removing: dict[ModelId, tuple[ModelSpec, set[InstanceId]]] = {}  # who has not answered yet
        for spec in scenario.specs:
            self._register(spec)
        for name in names:
            self._bring_up(InstanceId(name))

    @property
    def log(self) -> list[str]:
        return self._ground.log

    def run(self) -> None:
        draw, at_ns = self._ground.draw, 0
        for index in range(self.scenario.requests):
            at_ns += draw.below(self.scenario.gap_ns)
            self._ground.after(at_ns, self._arrival(RequestId(index + 1)))
        for _ in range(self.scenario.deaths):
            self._ground.after(draw.below(at_ns + 50_000_000), self._death)
        for _ in range(self.scenario.removals):
            self._ground.after(draw.below(at_ns + 50_000_000), self._removal)
        for index in range(self.scenario.moves):
            self._ground.after(draw.below(at_ns + 50_000_000), self._move(index))
        self._ground.run()
        for _ in range(3):  # what is idle gives everything back
            self._look()
            self._ground.after(self.scenario.idle_ns, self._look)
            self._ground.run()

    def decode_counters(self) -> list[Counters]:
        """Of all decode instances there ever were."""
        return [node.core.counters for node in [*self.lost, *self.nodes.values()] if isinstance(node.core, DecodeCore)]

    def check_end(self) -> None:
        """Everyone was answered, undisturbed, and everything is free again."""
        assert not self.session.states()
        for request, job in self.jobs.items():
            expected, got = reference(job.prompt, job.sampling), self.delivered[request]
            assert got == expected[: len(got)], f"{request}: {got} is not {expected}"
            assert got == expected or self.ended[request].state is not State.FINISHED
        for node in self.nodes.values():
            self._check_free(node)
        self.leases.check()
        assert self.leases.free >= self.scenario.host_slabs - len(self.nodes)
        self.arbiter.check()
        assert self.arbiter.free == self.scenario.pages, f"{self.arbiter.use()}"
        assert not self._ground.pages and not self._ground.dirty
        assert len(self.settled) == self.scenario.moves

    def _check_free(self, node: Node) -> None:
        ledger, accounts = node.core.ledger, node.core.ledger.accounts()
        ledger.check()
        assert not node.tracked, f"{node.instance} still tracks {node.tracked}"
        assert node.bound == set(self._models) == set(ledger.specs)
        assert not ledger.device.use() and not ledger.host.use(), accounts
        assert accounts["transfers_in_flight"] == 0
        assert accounts["device_pages"] == 0
        assert accounts["host_slabs_leased"] <= 1
        assert node.core.queued == node.core.running == 0
        assert not isinstance(node.core, PrefillCore) or node.core.handed == 0

    # --- what happens -----------------------------------------------------------------------------------------------

    def _arrival(self, request: RequestId) -> Action:
        draw, scenario = self._ground.draw, self.scenario
        spec = scenario.specs[draw.below(len(scenario.specs))]
        prompt = tuple(draw.below(50) for _ in range(1 + draw.below(scenario.prompt_max)))
        sampling = Sampling(max_tokens=1 + draw.below(scenario.output_max), stop_token_ids=(END_TOKEN,))
        leaves = draw.uniform() < scenario.cancel_share
        delay_ns = draw.below(100_000_000)
        most = scenario.priority_max
        priority = draw.below(2 * most + 1) - most if most else 0

        def arrive() -> None:
            if spec.model not in self._models:
                return  # refused at the door
            job = self.jobs[request] = Job(
                request, 1, spec.model, prompt, sampling, self._ground.now_ns, priority=priority
            )
            self._tell(Arrived(job))
            if leaves:
                self._ground.after(delay_ns, lambda: self._tell(ClientLeft(request)))

        return arrive

    def _death(self) -> None:
        living = sorted(self.nodes)
        if not living:
            return
        instance = living[self._ground.draw.below(len(living))]
        node = self.nodes.pop(instance)
        node.alive = False
        self.lost.append(node)
        for word in node.words.values():
            self._ground.poison(word)
        for other, message in self.leases.lost(instance):
            self._deliver(other, message)
        self._arbitrate(self.arbiter.lost(instance))
        self._tell(InstanceDown(instance))
        for model in list(self._removing):
            self._answered(instance, model)
        self._moved()
        self._ground.after(self._ground.draw.below(20_000_000), lambda: self._bring_up(instance))

    def _bring_up(self, instance: InstanceId) -> None:
        words = {name: self._next_word + i for i, name in enumerate(StreamName)}
        self._next_word += len(words)
        ledger = Ledger(self._budget, words, address_pages=1 << 20)
        core: PrefillCore | DecodeCore
        if instance.startswith("prefill"):
            core = self.scenario.prefill_core(instance, ledger, self.scenario.order)
        else:
            core = self.scenario.decode_core(instance, ledger, self.scenario.policy, Hardware())
        self.nodes[instance] = Node(self._ground, instance, core, words, hear=self._heard, moved=self._moved)
        self.leases.join(instance)
        self.arbiter.join(instance)
        for spec in self._models.values():
            self._deliver(instance, AddModel(spec))
        self._tell(InstanceUp(instance, Role(instance.partition("-")[0])))

    def _moved(self) -> None:
        for _, node in sorted(self.nodes.items()):
            node.pump()

    # --- models that come and go --------------------------------------------------------------------------------------

    def _register(self, spec: ModelSpec) -> None:
        limit = self._budget.sequence_tokens(spec.manifest.image_bytes, spec.manifest.kv)
        assert limit >= self.scenario.prompt_max + self.scenario.output_max, f"{spec.model} holds {limit} tokens only"
        self._models[spec.model] = spec
        self._tell(ModelUp(spec, limit))
        for instance in sorted(self.nodes):
            self._deliver(instance, AddModel(spec))

    def _removal(self) -> None:
        """A model leaves in the middle of its work; it comes back once nobody holds it any more."""
        if not self._models:
            return
        model = sorted(self._models)[self._ground.draw.below(len(self._models))]
        self._removing[model] = (self._models.pop(model), set(self.nodes))
        self._tell(ModelGone(model))
        for instance in sorted(self.nodes):
            self._deliver(instance, DropModel(model))

    def _answered(self, instance: InstanceId, model: ModelId) -> None:
        spec, waiting = self._removing[model]
        waiting.discard(instance)
        if not waiting:
            del self._removing[model]
            self.readded += 1
            self._register(spec)

    # --- the proxy's side -------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        for effect in self.session.on(event, self._ground.now_ns):
            match effect:
                case To(instance, message):
                    self._deliver(instance, message)
                case Deliver(request, first, tokens):
                    assert request not in self.ended and first == len(self.delivered[request])
                    self.delivered[request] += [token.id for token in tokens]
                case Ended():
                    assert effect.request not in self.ended
                    self.ended[effect.request] = effect

    def _heard(self, instance: InstanceId, message: FromInstance) -> None:
        self._look()
        match message:
            case NeedSlabs(count):
                grants = self.leases.ask(instance, count)
            case ReturnSlabs(slabs):
                grants = self.leases.give_back(instance, slabs)
            case PeerForgotten(peer):
                grants = self.leases.forgotten(instance, peer)
            case NeedPages():
                self._arbitrate(self.arbiter.ask(instance, message))
                return
            case GaveBack():
                self._arbitrate(self.arbiter.gave_back(instance, message))
                return
            case ModelDropped(model):
                self._answered(instance, model)
                return
            case _:
                self._tell(Heard(instance, message))
                return
        self.leases.check()
        for other, answer in grants:
            self._deliver(other, answer)

    def _arbitrate(self, effects: list[ArbiterEffect]) -> None:
        self.arbiter.check()
        for effect in effects:
            match effect:
                case WipeLost(key, runs):
                    self._ground.after(1_000_000, lambda key=key, runs=runs: self._wiped(key, runs))  # type: ignore[misc]
                case Settled(command):
                    assert command not in self.settled
                    self.settled[command] = effect
                case (instance, message):
                    self._deliver(instance, message)

    def _wiped(self, key: str, runs: Runs) -> None:
        for page in (page for run in runs for page in range(run.start, run.stop)):
            self._ground.pages.pop(page, None)
            self._ground.dirty.discard(page)
        self._arbitrate(self.arbiter.wiped(key))

    def _look(self) -> None:
        """Who is idle; as telemetry would tell."""
        now_ns = self._ground.now_ns
        for name, node in self.nodes.items():
            self.arbiter.seen(name, busy=node.core.queued + node.core.running > 0, now_ns=now_ns)
        effects = self.arbiter.tick(now_ns)
        if effects:
            self._arbitrate(effects)

    def _move(self, command: int) -> Action:
        """Somebody moves the limit of an instance while it serves, or trims it."""
        draw, scenario = self._ground.draw, self.scenario
        most = max(self._budget.least_pages(spec.manifest.image_bytes) for spec in scenario.specs)

        def move() -> None:
            name = sorted(self.nodes)[draw.below(len(self.nodes))] if self.nodes else None
            if name is None:
                self.settled[command] = Settled(command, 0)
            elif draw.uniform() < 0.3:
                self._arbitrate(self.arbiter.trim(name, command=command))
            else:
                pages = most + draw.below(scenario.pages - most + 1)
                self._arbitrate(
                    self.arbiter.set_limit(name, pages, command=command, patience_ns=draw.below(60_000_000))
                )

        return move

    def _deliver(self, instance: InstanceId, message: ToInstance) -> None:
        node = self.nodes[instance]
        self._ground.send(f"to {instance}", lambda: node.feed(message))
