"""A small world for the cores: the real session, prefill, decode and lease cores over memory made of dictionaries.

Durations, arrivals, cancellations and deaths are drawn from one seed. Memory is modelled so that a broken rule shows:
a copy reads its source and writes its target at its very end, a page's content is lost when another owner writes to
it, an engine computes the next token from what it finds in the KV blocks, and a step runs only on weights that are there.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from aegis.core.effects import (
    Bind,
    CopyBlocks,
    Effect,
    LoadWeights,
    MapKv,
    MapWeights,
    RunDecode,
    RunPrefill,
    Send,
    StreamName,
    Track,
    Unbind,
    UnmapKv,
    UnmapWeights,
    Untrack,
)
from aegis.core.estimators import Hardware
from aegis.core.events import InstanceEvent, Progress, Stepped
from aegis.core.ids import BlockId, InstanceId, ModelId, PageId, RequestId, SlabId
from aegis.core.messages import AddModel, FromInstance, NeedSlabs, PeerForgotten, ReturnSlabs, ToInstance
from aegis.core.model import KvLayer, KvShape, Manifest, ModelSpec, Slo
from aegis.core.request import EventHandle, Job, Sampling, Token
from aegis.core.rng import Stream
from decode.core import DecodeCore
from decode.policy import WeightedRoundRobin
from memory.ledger import Budget, Ledger
from memory.leases import SlabLeases
from prefill.core import PrefillCore
from prefill.policy import GroupedFcfs
from proxy.sessions import (
    Arrived,
    ClientLeft,
    Deliver,
    Ended,
    Event,
    Heard,
    InstanceDown,
    InstanceUp,
    ModelUp,
    SessionCore,
    To,
)

PAGE = 1 << 21
END_TOKEN = 7


def next_token(sequence: tuple[int, ...]) -> int:
    """What the pretended model says after `sequence`."""
    return int.from_bytes(blake2b(repr(sequence).encode(), digest_size=2).digest(), "little") % 50


def reference(prompt: tuple[int, ...], sampling: Sampling) -> list[int]:
    """The undisturbed answer."""
    tokens: list[int] = []
    while not tokens or (len(tokens) < sampling.max_tokens and tokens[-1] not in sampling.stop_token_ids):
        tokens.append(next_token((*prompt, *tokens)))
    return tokens


def make_spec(index: int, *, image_pages: int, block_bytes: int) -> ModelSpec:
    """A model whose KV block has `block_bytes`, which must be a multiple of 64."""
    shape = KvShape((KvLayer(1, block_bytes // 64 // 2, block_bytes // 64 // 2),), "float32", 4)
    assert shape.block_bytes == block_bytes
    manifest = Manifest(
        fingerprint=str(index),
        architecture="None",
        dtype="float32",
        image_bytes=image_pages * PAGE - 5,
        tensors=(),
        kv=shape,
        context_tokens=4096,
        vocab_size=50,
        eos_token_ids=(END_TOKEN,),
        hidden_size=64,
        intermediate_size=128,
        parameters=1_000_000,
    )
    return ModelSpec(ModelId(f"m{index}"), manifest, "", "", "", Slo())


@dataclass(slots=True)
class _Copy:
    event: EventHandle
    after: EventHandle | None
    duration_ns: int
    finish: Callable[[], None]


@dataclass(slots=True)
class _Node:
    """One incarnation of an instance: its core, device memory and streams."""

    instance: InstanceId
    core: PrefillCore | DecodeCore
    words: dict[StreamName, int]
    alive: bool = True
    kv: dict[tuple[KvShape, BlockId], list[int | None]] = field(default_factory=dict)
    slab_pages: dict[SlabId, tuple[PageId, ...]] = field(default_factory=dict)
    weight_pages: dict[ModelId, tuple[PageId, ...]] = field(default_factory=dict)
    loaded: dict[PageId, ModelId] = field(default_factory=dict)
    queues: dict[StreamName, list[_Copy]] = field(default_factory=lambda: {name: [] for name in StreamName})
    running: dict[StreamName, bool] = field(default_factory=lambda: dict.fromkeys(StreamName, False))
    tracked: set[RequestId] = field(default_factory=set)
    inbox: list[InstanceEvent] = field(default_factory=list)
    stepping: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Sizes of a run."""

    specs: tuple[ModelSpec, ...]
    pages: int
    host_slabs: int
    prefills: int = 1
    decodes: int = 1
    requests: int = 40
    deaths: int = 0
    cancel_share: float = 0.1
    gap_ns: int = 2_000_000
    q_max_ns: int = 30_000_000
    prompt_max: int = 120
    output_max: int = 80


class World:
    """`run` plays a scenario to its end and checks every law after every event."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.now_ns = 0
        self.delivered: defaultdict[RequestId, list[int]] = defaultdict(list)
        self.ended: dict[RequestId, Ended] = {}
        self.jobs: dict[RequestId, Job] = {}
        self.log: list[str] = []
        self._draw = Stream(seed, "world")
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        self._words: defaultdict[int, int] = defaultdict(int)
        self._next_word = 0
        self._host: dict[tuple[KvShape, BlockId], list[int | None]] = {}
        names = [f"prefill-{i}" for i in range(scenario.prefills)] + [f"decode-{i}" for i in range(scenario.decodes)]
        self._budget = Budget(
            pages=scenario.pages, page_bytes=PAGE, slab_bytes=PAGE, host_slabs=scenario.host_slabs, instances=len(names)
        )
        self.session = SessionCore(GroupedFcfs(), WeightedRoundRobin(scenario.q_max_ns), Hardware())
        self.leases = SlabLeases(scenario.host_slabs)
        self.nodes: dict[InstanceId, _Node] = {}
        self.dead: list[_Node] = []
        for spec in scenario.specs:
            limit = self._budget.sequence_tokens(spec.manifest.image_bytes, spec.manifest.kv)
            assert limit >= scenario.prompt_max + scenario.output_max, f"{spec.model} holds {limit} tokens only"
            self._tell(ModelUp(spec, limit))
        for name in names:
            self._bring_up(InstanceId(name))

    # --- running --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        at_ns = 0
        for index in range(self.scenario.requests):
            at_ns += self._draw.below(self.scenario.gap_ns)
            self._schedule(at_ns, self._arrival(RequestId(index + 1)))
        for _ in range(self.scenario.deaths):
            self._schedule(self._draw.below(at_ns + 50_000_000), self._death)
        while self._heap:
            self.now_ns, _, action = heapq.heappop(self._heap)
            action()

    def check_end(self) -> None:
        """Everyone was answered, undisturbed, and everything is free again."""
        for request, job in self.jobs.items():
            assert request in self.ended, f"{request} never ended: {self.session.states().get(request)}"
            expected = reference(job.prompt, job.sampling)
            got = self.delivered[request]
            assert got == expected[: len(got)], f"{request}: {got} is not {expected}"
            if self.ended[request].state == "finished":
                assert got == expected
        for node in self.nodes.values():
            ledger, accounts = node.core.ledger, node.core.ledger.accounts()
            ledger.check()
            assert not node.tracked, f"{node.instance} still tracks {node.tracked}"
            assert not ledger.device.use() and not ledger.host.use(), accounts
            assert accounts["transfers_in_flight"] == 0
            assert accounts["device_pages_free"] + accounts["device_pages_weights"] == self.scenario.pages
            assert accounts["host_slabs_leased"] <= 1
        self.leases.check()
        assert self.leases.free >= self.scenario.host_slabs - len(self.nodes)

    # --- what happens -----------------------------------------------------------------------------------------------

    def _arrival(self, request: RequestId) -> Callable[[], None]:
        draw, scenario = self._draw, self.scenario
        spec = scenario.specs[draw.below(len(scenario.specs))]
        prompt = tuple(draw.below(50) for _ in range(1 + draw.below(scenario.prompt_max)))
        sampling = Sampling(max_tokens=1 + draw.below(scenario.output_max), stop_token_ids=(END_TOKEN,))
        leaves = draw.uniform() < scenario.cancel_share
        delay_ns = draw.below(100_000_000)

        def arrive() -> None:
            job = self.jobs[request] = Job(request, 1, spec.model, prompt, sampling, self.now_ns)
            self._tell(Arrived(job))
            if leaves:
                self._schedule(self.now_ns + delay_ns, lambda: self._tell(ClientLeft(request)))

        return arrive

    def _death(self) -> None:
        living = sorted(self.nodes)
        if not living:
            return
        instance = living[self._draw.below(len(living))]
        node = self.nodes.pop(instance)
        node.alive = False
        self.dead.append(node)
        for word in node.words.values():
            self._words[word] = (1 << 63) - 1
        for other, message in self.leases.lost(instance):
            self._deliver(other, message)
        self._tell(InstanceDown(instance))
        self._wake_streams()
        self._schedule(self.now_ns + self._draw.below(20_000_000), lambda: self._bring_up(instance))

    def _bring_up(self, instance: InstanceId) -> None:
        words = {name: self._next_word + i for i, name in enumerate(StreamName)}
        self._next_word += len(words)
        ledger = Ledger(self._budget, words, address_pages=1 << 20)
        core: PrefillCore | DecodeCore
        if instance.startswith("prefill"):
            core = PrefillCore(instance, ledger)
        else:
            core = DecodeCore(instance, ledger, WeightedRoundRobin(self.scenario.q_max_ns), Hardware())
        self.nodes[instance] = _Node(instance, core, words)
        self.leases.join(instance)
        for spec in self.scenario.specs:
            self._deliver(instance, AddModel(spec))
        self._tell(InstanceUp(instance, instance.startswith("prefill")))

    # --- the proxy's side -------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        for effect in self.session.on(event, self.now_ns):
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
        match message:
            case NeedSlabs(count):
                grants = self.leases.ask(instance, count)
            case ReturnSlabs(slabs):
                grants = self.leases.give_back(instance, slabs)
            case PeerForgotten(peer):
                grants = self.leases.forgotten(instance, peer)
            case _:
                self._tell(Heard(instance, message))
                return
        self.leases.check()
        for other, answer in grants:
            self._deliver(other, answer)

    def _deliver(self, instance: InstanceId, message: ToInstance) -> None:
        node = self.nodes[instance]
        self._schedule(self.now_ns + 50_000, lambda: self._feed(node, message), ordered=True)

    # --- an instance's side -------------------------------------------------------------------------------------------

    def _feed(self, node: _Node, event: InstanceEvent) -> None:
        """A stepping instance looks at messages when its step is over, as a real one does."""
        if not node.alive:
            return
        if node.stepping and not isinstance(event, Stepped):
            node.inbox.append(event)
            return
        events = [event]
        if isinstance(event, Stepped):
            node.stepping = False
            events, node.inbox = [event, *node.inbox], []
        while events:
            event = events.pop(0)
            self._perform(node, node.core.on(event, self.now_ns))
            node.core.ledger.check()
            if node.stepping:
                node.inbox += events
                return

    def _perform(self, node: _Node, effects: list[Effect]) -> None:
        assert not any(isinstance(effect, RunPrefill | RunDecode) for effect in effects[:-1]), "a step is not the last"
        for effect in effects:
            match effect:
                case Send(message):
                    self.log.append(f"{self.now_ns} {node.instance} {message}")
                    self._schedule(self.now_ns + 50_000, self._speak(node, message), ordered=True)
                case RunPrefill() | RunDecode():
                    assert not node.stepping
                    node.stepping = True
                    self.log.append(f"{self.now_ns} {node.instance} {effect}")
                    stepped = (
                        self._prefill(node, effect) if isinstance(effect, RunPrefill) else self._decode(node, effect)
                    )
                    self._schedule(self.now_ns + stepped.duration_ns, lambda s=stepped: self._feed(node, s))
                case Track(job, _):
                    node.tracked.add(job.request)
                case Untrack(request):
                    node.tracked.discard(request)
                case Bind() | Unbind():
                    pass
                case _:
                    self._memory(node, effect)

    def _speak(self, node: _Node, message: FromInstance) -> Callable[[], None]:
        return lambda: self._heard(node.instance, message) if node.alive else None

    def _memory(self, node: _Node, effect: Effect) -> None:
        match effect:
            case MapKv(slab, pages):
                self._claim(node, pages)
                node.slab_pages[slab] = pages
            case UnmapKv(slab):
                del node.slab_pages[slab]
                per = {shape for shape, _ in node.kv}
                for shape in per:
                    count = PAGE // shape.block_bytes
                    for block in range(slab * count, (slab + 1) * count):
                        node.kv.pop((shape, BlockId(block)), None)
            case MapWeights(model, pages):
                self._claim(node, pages)
                node.weight_pages[model] = pages
            case UnmapWeights(model):
                del node.weight_pages[model]
            case LoadWeights(model, event):
                pages = node.weight_pages[model]
                duration_ns = 200_000 * len(pages) + self._draw.below(500_000)
                self._submit(
                    node, StreamName.WEIGHTS, _Copy(event, None, duration_ns, lambda: self._load(node, model, pages))
                )
            case CopyBlocks():
                duration_ns = 20_000 * len(effect.pairs) + self._draw.below(3_000_000)
                copy = _Copy(effect.event, effect.after, duration_ns, lambda: self._copy(node, effect))
                self._submit(node, effect.stream, copy)

    def _claim(self, node: _Node, pages: tuple[PageId, ...]) -> None:
        """Mapped at one place at a time; whatever was in the pages is gone."""
        mapped = [p for held in (node.slab_pages, node.weight_pages) for run in held.values() for p in run]
        assert not set(mapped) & set(pages), "a page is mapped twice"
        for page in pages:
            node.loaded.pop(page, None)

    def _load(self, node: _Node, model: ModelId, pages: tuple[PageId, ...]) -> None:
        assert node.weight_pages.get(model) == pages, f"{model} was unmapped while it was loading"
        node.loaded.update(dict.fromkeys(pages, model))

    def _copy(self, node: _Node, effect: CopyBlocks) -> None:
        source, target = (node.kv, self._host) if effect.stream is StreamName.SWAP_OUT else (self._host, node.kv)
        for a, b in effect.pairs:
            device = a if effect.stream is StreamName.SWAP_OUT else b
            assert SlabId(device // (PAGE // effect.shape.block_bytes)) in node.slab_pages, (
                "copy touches unmapped memory"
            )
            target[effect.shape, b] = list(source.get((effect.shape, a), []))

    # --- streams ------------------------------------------------------------------------------------------------------

    def _submit(self, node: _Node, stream: StreamName, copy: _Copy) -> None:
        node.queues[stream].append(copy)
        self._pump(node, stream)

    def _pump(self, node: _Node, stream: StreamName) -> None:
        queue = node.queues[stream]
        if not node.alive or node.running[stream] or not queue:
            return
        copy = queue[0]
        if copy.after is not None and self._words[copy.after.word] < copy.after.value:
            return  # pumped again when any word moves
        node.running[stream] = True
        self._schedule(self.now_ns + copy.duration_ns, lambda: self._completed(node, stream, copy))

    def _completed(self, node: _Node, stream: StreamName, copy: _Copy) -> None:
        if not node.alive:
            return
        copy.finish()
        node.queues[stream].pop(0)
        node.running[stream] = False
        self._words[copy.event.word] = copy.event.value
        self._wake_streams()
        self._feed(node, Progress(stream, copy.event.value))

    def _wake_streams(self) -> None:
        for _, node in sorted(self.nodes.items()):
            for stream in StreamName:
                self._pump(node, stream)

    # --- the pretended engine ---------------------------------------------------------------------------------------

    def _weights_there(self, node: _Node, model: ModelId) -> None:
        assert all(node.loaded.get(page) == model for page in node.weight_pages[model]), f"{model} is not loaded"

    def _block(self, node: _Node, shape: KvShape, block: BlockId) -> list[int | None]:
        assert SlabId(block // (PAGE // shape.block_bytes)) in node.slab_pages, "the step touches unmapped memory"
        content = node.kv.setdefault((shape, block), [])
        content += [None] * (shape.block_tokens - len(content))
        return content

    def _prefill(self, node: _Node, effect: RunPrefill) -> Stepped:
        job = effect.job
        self._weights_there(node, job.model)
        shape = node.core.ledger.specs[job.model].manifest.kv
        sequence = (*job.prompt, *job.sent)
        for position, token in enumerate(sequence):
            self._block(node, shape, effect.blocks[position // 16])[position % 16] = token
        duration_ns = 1_000_000 + 10_000 * len(sequence) + self._draw.below(1_000_000)
        return Stepped((Token(next_token(sequence)),), duration_ns)

    def _decode(self, node: _Node, effect: RunDecode) -> Stepped:
        self._weights_there(node, effect.model)
        shape = node.core.ledger.specs[effect.model].manifest.kv
        tokens = []
        for row in effect.rows:
            self._block(node, shape, row.blocks[row.position // 16])[row.position % 16] = row.token
            found = tuple(self._block(node, shape, row.blocks[p // 16])[p % 16] for p in range(row.position + 1))
            tokens.append(Token(next_token(found)))  # type: ignore[arg-type]
        return Stepped(tuple(tokens), 2_000_000 + self._draw.below(1_000_000))

    def _schedule(self, at_ns: int, action: Callable[[], None], *, ordered: bool = False) -> None:
        """Events of one time happen in the order they were scheduled in."""
        del ordered
        self._sequence += 1
        heapq.heappush(self._heap, (at_ns, self._sequence, action))
