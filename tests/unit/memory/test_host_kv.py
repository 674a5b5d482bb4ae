"""Kept KV: found by its tokens, gone at once if its room is needed, and never read as other KV."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aegis.core.block_runs import block_ids, count_blocks
from aegis.core.ids import BlockId, InstanceId, ModelId, RequestId, SlabId
from aegis.core.messages import (
    CheckPrefix,
    GrantSlabs,
    KeepKv,
    KvKept,
    NeedSlabs,
    OfferKv,
    PrefixChecked,
    ReturnSlabs,
    Submit,
)
from aegis.core.model import KvShape, ModelSpec
from aegis.core.request import Job, KeptPrefix, Sampling
from aegis.sim.faults.fake_models import BLOCK_TOKENS, PAGE, make_spec
from memory.host_kv import Answers, HostKv
from memory.kept_prefixes import token_bytes

A, B = InstanceId("a"), InstanceId("b")
SPECS = {
    spec.model: spec
    for spec in (make_spec(at, image_pages=1, block_bytes=PAGE // blocks) for at, blocks in enumerate((2, 4)))
}
M, N = SPECS
SLABS = 5

instances = st.sampled_from([A, B])
models = st.sampled_from([M, N])
texts = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)  # a block each
Text = tuple[int, ...]


def spelled(text: Text) -> tuple[int, ...]:
    return tuple(token for token in text for _ in range(BLOCK_TOKENS))


def submit(model: ModelId, text: Text, *, request: int = 1, more: tuple[int, ...] = (9,), **sampling: int) -> Submit:
    parameters = Sampling(max_tokens=1, **sampling)  # type: ignore[arg-type]
    return Submit(Job(RequestId(request), 1, model, spelled(text) + more, parameters, 0))


def offer(number: int, model: ModelId, text: Text) -> OfferKv:
    return OfferKv(number, model, token_bytes(spelled(text)))


@dataclass
class Writing:
    model: ModelId
    text: Text
    answer: KeepKv


@dataclass
class Reading:
    text: Text
    prefix: KeptPrefix
    model: ModelId


@dataclass
class Instance:
    held: set[SlabId] = field(default_factory=set)
    writing: dict[int, Writing] = field(default_factory=dict)
    reading: dict[int, Reading] = field(default_factory=dict)
    waits: bool = False  # for slabs, and was not refused


class Keeping(RuleBasedStateMachine):
    """The bytes, and what instances do to them: `memory` says which text the KV in a block is of."""

    def __init__(self) -> None:
        super().__init__()
        self.host = HostKv(SLABS, PAGE, SPECS.get)
        self.memory: dict[tuple[KvShape, BlockId], Text] = {}
        self.instances = {A: Instance(), B: Instance()}
        self.numbers = 0
        for instance in self.instances:
            self.host.join(instance)

    def slab_of(self, model: ModelId, block: BlockId) -> SlabId:
        return SlabId(block // (PAGE // SPECS[model].manifest.kv.block_bytes))

    def taken(self) -> set[SlabId]:
        return set().union(*(instance.held for instance in self.instances.values()))

    def told(self, answers: Answers) -> list[object]:
        """Slabs that are granted are overwritten at once."""
        for name, message in answers:
            if isinstance(message, GrantSlabs):
                instance = self.instances[name]
                assert not self.taken() & set(message.slabs)
                instance.waits = False
                instance.held |= set(message.slabs)
                for at in [at for at in self.memory if self.at(at) in message.slabs]:
                    del self.memory[at]
        return [message for _, message in answers]

    def of(self, model: ModelId, shape: KvShape) -> bool:
        return SPECS[model].manifest.kv == shape

    def at(self, place: tuple[KvShape, BlockId]) -> SlabId:
        shape, block = place
        return SlabId(block // (PAGE // shape.block_bytes))

    @rule(name=instances, model=models, text=texts)
    def begin_to_write(self, name: InstanceId, model: ModelId, text: Text) -> None:
        self.numbers += 1
        ((_, answer),) = self.host.on_message(name, offer(self.numbers, model, text))
        assert isinstance(answer, KeepKv) and answer.first + count_blocks(answer.blocks) <= len(text)
        if answer.blocks:
            self.instances[name].writing[self.numbers] = Writing(model, text, answer)

    @rule(name=instances, model=models, text=texts)
    def write(self, name: InstanceId, model: ModelId, text: Text) -> None:
        self.begin_to_write(name, model, text)
        if self.numbers in self.instances[name].writing:
            self._end(name, self.numbers, done=True)

    @rule(name=instances, data=st.data(), done=st.booleans())
    def end_writing(self, name: InstanceId, data: st.DataObject, done: bool) -> None:
        writing = self.instances[name].writing
        if not writing:
            return
        self._end(name, data.draw(st.sampled_from(sorted(writing))), done=done)

    def _end(self, name: InstanceId, number: int, *, done: bool) -> None:
        its = self.instances[name].writing.pop(number)
        for at, block in enumerate(block_ids(its.answer.blocks), its.answer.first + 1):
            assert self.slab_of(its.model, block) not in self.taken(), "KV that lives is overwritten"
            self.memory[SPECS[its.model].manifest.kv, block] = its.text[:at]
        self.told(self.host.on_message(name, KvKept(number, done)))

    @rule(name=instances, data=st.data())
    def begin_to_read(self, name: InstanceId, data: st.DataObject) -> None:
        """What was written once, or something else."""
        written = sorted(
            (model, text) for model in SPECS for (shape, _), text in self.memory.items() if self.of(model, shape)
        )
        model, text = data.draw(st.sampled_from(written) if written else st.tuples(models, texts))
        prefix = self.host.looked_up(submit(model, text)).job.kept
        if prefix:
            self.numbers += 1
            assert self.read(Reading(text, prefix, model)), "found what is not there"
            self.instances[name].reading[self.numbers] = Reading(text, prefix, model)

    @rule(name=instances, data=st.data())
    def end_reading(self, name: InstanceId, data: st.DataObject) -> None:
        reading = self.instances[name].reading
        if not reading:
            return
        number = data.draw(st.sampled_from(sorted(reading)))
        its = reading.pop(number)
        right = self.read(its)
        ((_, answer),) = self.host.on_message(name, CheckPrefix(RequestId(1), 1, its.prefix.entry))
        assert isinstance(answer, PrefixChecked)
        assert right or not answer.intact, "what is not the prompt's KV is taken for it"

    def read(self, its: Reading) -> bool:
        blocks, shape = list(block_ids(its.prefix.blocks)), SPECS[its.model].manifest.kv
        assert len(blocks) * BLOCK_TOKENS == its.prefix.tokens
        return [self.memory.get((shape, block)) for block in blocks] == [
            its.text[: at + 1] for at in range(len(blocks))
        ]

    @rule(name=instances, count=st.sampled_from([1, 1, 2, SLABS]))
    def ask(self, name: InstanceId, count: int) -> None:
        """What lives is refused nothing for the sake of what is kept, and waits for nothing but what is written to."""
        if self.instances[name].waits:
            return
        waiting = any(other.waits for other in self.instances.values())
        first = not self.host.leases._wanted
        at_once = self.host.leases.free + self.host.kept.idle >= count
        soon = self.host.leases.free + self.host.leases.kept >= count
        self.instances[name].waits = True
        answers = self.told(self.host.on_message(name, NeedSlabs(count)))
        refused = GrantSlabs((), refused=True) in answers
        if first and not waiting:
            assert refused != soon
            assert bool(answers) == (at_once or not soon)
        if refused:
            self.instances[name].waits = False

    @rule(name=instances, data=st.data())
    def give_back(self, name: InstanceId, data: st.DataObject) -> None:
        held = sorted(self.instances[name].held)
        if held:
            slabs = data.draw(st.lists(st.sampled_from(held), unique=True)) or held
            self.instances[name].held -= set(slabs)
            self.told(self.host.on_message(name, ReturnSlabs(tuple(slabs))))

    @rule(name=instances)
    def press(self, name: InstanceId) -> None:
        """All that can go goes."""
        instance = self.instances[name]
        if (
            not self.host.leases._wanted
            and not instance.waits
            and (count := self.host.leases.free + self.host.kept.idle)
        ):
            before = set(instance.held)
            self.told(self.host.on_message(name, NeedSlabs(count)))
            granted = instance.held - before
            assert len(granted) == count and self.host.kept.idle == 0
            instance.held = before
            self.told(self.host.on_message(name, ReturnSlabs(tuple(sorted(granted)))))

    @rule(name=instances)
    def lose(self, name: InstanceId) -> None:
        """It comes back at once, and the others have nothing of it to forget."""
        other = B if name == A else A
        self.instances[name] = Instance()
        self.told(self.host.lost(name, ()))
        self.told([*self.host.leases.forgotten(other, name)])
        self.host.join(name)

    @invariant()
    def the_laws_hold(self) -> None:
        self.host.check()
        assert self.host.leases.leased == len(self.taken())


Keeping.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestKeeping = Keeping.TestCase


class Kept:
    """A host of so many slabs, in which everything is written at once."""

    def __init__(self, slabs: int) -> None:
        self.host = HostKv(slabs, PAGE, SPECS.get)
        self.host.join(A)
        self.numbers = 0

    def keep(self, text: Text, model: ModelId = N) -> int:
        """How many blocks of it were new."""
        self.numbers += 1
        ((_, answer),) = self.host.on_message(A, offer(self.numbers, model, text))
        assert isinstance(answer, KeepKv)
        if answer.blocks:
            self.host.on_message(A, KvKept(self.numbers, done=True))
        return count_blocks(answer.blocks)

    def finds(self, text: Text, model: ModelId = N, **more: int) -> int:
        """How many tokens of a longer prompt."""
        return self.host.looked_up(submit(model, text, **more)).job.kept_tokens


def test_a_prompt_finds_what_it_begins_with() -> None:
    kept = Kept(2)
    assert kept.keep((1, 2, 3)) == 3
    assert kept.finds((1, 2, 3)) == 3 * BLOCK_TOKENS
    assert kept.finds((1, 2, 4)) == 2 * BLOCK_TOKENS
    assert kept.finds((2, 2, 3)) == 0
    assert kept.finds((1, 2, 3), M) == 0, "of another model"
    assert kept.keep((1, 2, 4)) == 1 and kept.keep((1, 2)) == 0


def test_the_last_token_of_a_prompt_is_run() -> None:
    kept = Kept(1)
    kept.keep((1, 2))
    whole = kept.host.looked_up(submit(N, (1, 2), more=()))
    assert whole.job.kept_tokens == BLOCK_TOKENS
    assert kept.finds((1, 2), prompt_logprobs=0) == 0


def test_what_is_not_written_yet_is_not_found() -> None:
    kept = Kept(2)
    kept.host.on_message(A, offer(1, N, (1, 2)))
    assert kept.finds((1, 2)) == 0
    kept.host.on_message(A, offer(2, N, (1, 2, 3)))
    kept.host.on_message(A, KvKept(2, done=True))
    assert kept.finds((1, 2, 3)) == 0, "what it goes on from is not there"
    kept.host.on_message(A, KvKept(1, done=True))
    assert kept.finds((1, 2, 3)) == 3 * BLOCK_TOKENS


def test_what_was_used_the_longest_ago_goes_first() -> None:
    kept = Kept(3)
    for text in ((1,) * 4, (2,) * 4, (3,) * 4):
        kept.keep(text)
    kept.finds((1,) * 4)
    kept.keep((4,) * 4)
    assert [kept.finds((at,) * 4) // BLOCK_TOKENS for at in (1, 2, 3, 4)] == [4, 0, 4, 4]
    assert kept.host.kept.counters.evicted_blocks == 4


def test_a_long_prompt_evicts_nothing_of_itself() -> None:
    kept = Kept(2)
    assert kept.keep((1,) * 12) == 8, "as much as there is room for"
    assert kept.finds((1,) * 12) == 8 * BLOCK_TOKENS
    assert kept.keep((1,) * 12) == 0


def test_what_goes_on_from_an_evicted_block_goes_with_it() -> None:
    kept = Kept(3)
    kept.keep((1,) * 4)
    kept.keep((1,) * 4 + (2,))
    assert kept.host.kept.release(1)
    assert kept.finds((1,) * 4 + (2,)) == 0 and not kept.host.kept.nbytes
    kept.host.kept.check()


def test_a_removed_model_is_asked_for_nothing() -> None:
    gone: dict[ModelId, ModelSpec] = {}
    host = HostKv(1, PAGE, gone.get)
    host.join(A)
    assert host.on_message(A, offer(1, N, (1,))) == [(A, KeepKv(1, 0, ()))]
    assert host.looked_up(submit(N, (1,))).job.kept is None
