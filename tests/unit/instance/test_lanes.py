"""Runs on two lanes side by side: a small engine whose steps wait until the test lets them, and a real one."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import pytest
from transformers import LlamaConfig

from aegis.control.progress import LoopProgress, Progress
from aegis.core.clock import NS_PER_S
from aegis.core.effects import Row, Run
from aegis.core.events import StepFailed, Stepped
from aegis.core.ids import BlockRun, InstanceId, ModelId, RequestId
from aegis.core.messages import Tokens
from aegis.core.model import ModelSpec
from aegis.core.request import FinishReason, Job, Sampling, Token
from aegis.device.cpu.device import CpuDevice
from aegis.device.cpu.pool import CpuPool
from aegis.device.divisions import WHOLE, Shares
from aegis.device.shared_events import SharedWords
from aegis.engine.protocol import Engine, Sampled, StepRow
from aegis.engine.transformers_engine import TransformersEngine
from aegis.instance.lanes import Lanes
from aegis.instance.span_log import SpanLog
from aegis.process.clock import MonotonicClock
from aegis.sim.faults.fake_models import make_spec
from aegis.telemetry.spans import SpanKind, Spans
from tests.sim.driven import make_job
from tests.unit.engine.images import Arena, Built, build

HALVES: Shares = (500, 500)
A = make_spec(0, image_pages=1, block_bytes=1024)
BLOCKS = [(3, 9)]
FOR_EVER_NS = 1 << 62


class Gated:
    """An engine whose token is the last one of a row and its position, added. Each step waits until `let` was called
    for its first request. A request in `failing` raises."""

    def __init__(self) -> None:
        self.begun: SimpleQueue[RequestId] = SimpleQueue()
        self.threads: dict[RequestId, str] = {}
        self.stopped: list[RequestId] = []
        self.failing: dict[RequestId, Exception] = {}
        self.short: set[RequestId] = set()
        self._gates: dict[RequestId, threading.Semaphore] = {}

    def let(self, request: int, steps: int = 1) -> None:
        self._gate(RequestId(request)).release(steps)

    def begins(self, count: int = 1) -> set[RequestId]:
        """The requests whose steps have begun meanwhile; waits for so many."""
        return {self.begun.get(timeout=20) for _ in range(count)}

    def _gate(self, request: RequestId) -> threading.Semaphore:
        return self._gates.setdefault(request, threading.Semaphore(0))

    def prepare(self, spec: ModelSpec) -> None: ...

    def discard(self, spec: ModelSpec) -> None: ...

    def attach(self, spec: ModelSpec, weights_base: int) -> None: ...

    def detach(self, model: ModelId) -> None: ...

    def ready(self, model: ModelId, sampling: Sampling) -> bool:
        return True

    def start(
        self,
        model: ModelId,
        request: RequestId,
        prompt: Sequence[int],
        generated: Sequence[int],
        sampling: Sampling,
    ) -> None:
        self.threads[request] = threading.current_thread().name
        if request in self.failing and not prompt:
            raise self.failing[request]

    def stop(self, request: RequestId) -> None:
        self.stopped.append(request)

    def extends(self, model: ModelId) -> bool:
        return True

    def step(self, model: ModelId, rows: Sequence[StepRow]) -> list[Sampled | None]:
        first = rows[0].request
        self.begun.put(first)
        assert self._gate(first).acquire(timeout=20)
        if first in self.failing:
            raise self.failing[first]
        made: list[Sampled | None] = [Sampled(Token(row.tokens[-1] + row.start)) for row in rows if row.samples]
        return made[1:] if first in self.short else made


class Stand:
    """Lanes on a device, and what they delivered."""

    def __init__(self, words: SharedWords, engine: Engine) -> None:
        self._pool = CpuPool(8 << 20)
        self._device = CpuDevice(self._pool.address, words, threads=2)
        self.loop_progress = LoopProgress()
        self.spans = SpanLog(InstanceId("mixed-0"), MonotonicClock())
        self.delivered: list[Tokens] = []
        clock = MonotonicClock()
        self.lanes = Lanes(
            self._device,
            self._device.partitions(),
            engine,
            clock,
            self.delivered.extend,
            self.spans,
            self.loop_progress,
        )

    def heard(self, enough: Callable[[list[Stepped | StepFailed]], bool]) -> list[Stepped | StepFailed]:
        """What has been drained, whenever the wakeup rang, until it is enough."""
        assert self.lanes.wakeup
        ended = list[Stepped | StepFailed]()
        while not enough(ended):
            rung, _, _ = select.select([self.lanes.wakeup], [], [], 20)
            assert rung, "nothing is told any more"
            ended += self.lanes.drain()
        return ended

    def ended(self, count: int) -> list[Stepped | StepFailed]:
        return self.heard(lambda ended: len(ended) >= count)

    def close(self) -> None:
        self.lanes.close()
        self._device.close()
        self._pool.close()


@pytest.fixture
def words() -> Iterator[SharedWords]:
    words = SharedWords.create(8)
    yield words
    words.close()


@pytest.fixture
def engine() -> Gated:
    return Gated()


@pytest.fixture
def stand(words: SharedWords, engine: Gated) -> Iterator[Stand]:
    stand = Stand(words, engine)
    stand.lanes.divide(HALVES)
    yield stand
    for request in range(1, 10):
        engine.let(request, 100)
    stand.close()


def decodes(request: int, *, lane: int, steps: int = 50, most: int = 100) -> Run:
    row = Row(make_job(request, A, max_tokens=most), 30, 31, BLOCKS, 4, 20)
    return Run(A.model, (row,), steps, FOR_EVER_NS, lane)


def prompt(request: int, *, lane: int) -> Run:
    job = make_job(request, A, prompt=30)
    return Run(A.model, (Row(job, 0, 30, BLOCKS, 0),), 1, FOR_EVER_NS, lane)


def test_tokens_of_one_lane_leave_while_a_step_of_the_other_is_under_way(stand: Stand, engine: Gated) -> None:
    assert stand.lanes.begin(prompt(2, lane=1)) == []
    assert stand.lanes.begin(decodes(1, lane=0)) == []
    assert engine.begins(2) == {1, 2}
    engine.let(1, 3)
    assert stand.heard(lambda _: len(stand.delivered) == 3) == []
    assert [(m.request, m.first, m.tokens[0].id) for m in stand.delivered] == [(1, 4, 50), (1, 5, 81), (1, 6, 113)]
    engine.let(2)
    (stepped,) = stand.ended(1)
    assert isinstance(stepped, Stepped)
    assert stepped.lane == 1
    assert stepped.steps == ((Token(29),),)
    assert engine.threads == {2: threading.current_thread().name}, "requests are started by the main loop's thread"


def test_a_run_is_ended_without_the_other(stand: Stand, engine: Gated) -> None:
    for request, lane in ((1, 0), (2, 1)):
        stand.lanes.begin(decodes(request, lane=lane))
    engine.begins(2)
    stand.lanes.end_soon(0)
    engine.let(1, 5)
    engine.let(2, 2)
    (stepped,) = stand.ended(1)
    assert isinstance(stepped, Stepped)
    assert (stepped.lane, len(stepped.steps)) == (0, 1)
    stand.lanes.begin(decodes(3, lane=0))
    engine.let(3, 2)
    made = {2: 2, 3: 2}  # an end that was asked for is no later run's
    stand.heard(lambda _: all(len([m for m in stand.delivered if m.request == each]) == made[each] for each in made))


def test_a_run_ends_by_itself_as_on_the_whole_device(stand: Stand, engine: Gated) -> None:
    stand.lanes.begin(decodes(1, lane=0, steps=2))
    stand.lanes.begin(decodes(2, lane=1, most=6))
    engine.let(1, 9)
    engine.let(2, 9)
    ended = {each.lane: each for each in stand.ended(2)}
    assert {lane: len(each.steps) for lane, each in ended.items() if isinstance(each, Stepped)} == {0: 2, 1: 2}
    assert [m.finish for m in stand.delivered if m.request == 2] == [None, FinishReason.LENGTH]


def test_a_request_is_forgotten_only_after_the_run_that_has_it(stand: Stand, engine: Gated) -> None:
    stand.lanes.begin(decodes(1, lane=0))
    engine.begins()
    for request in (1, 5):
        stand.lanes.stop(RequestId(request))
    assert engine.stopped == [5]
    stand.lanes.end_soon(0)
    engine.let(1)
    stand.ended(1)
    assert engine.stopped == [5, 1]
    stand.lanes.begin(decodes(2, lane=0, steps=1))
    engine.let(2)
    stand.ended(1)
    assert engine.stopped == [5, 1]


def test_an_engine_that_raises_fails_the_requests_of_its_lane_alone(stand: Stand, engine: Gated) -> None:
    engine.failing[RequestId(2)] = ValueError("what the model did")
    stand.lanes.begin(decodes(1, lane=0, steps=2))
    stand.lanes.begin(decodes(2, lane=1))
    engine.let(2)
    assert stand.ended(1) == [StepFailed("the model failed on this request (ValueError)", 1)]
    engine.let(1, 2)
    (stepped,) = stand.ended(1)
    assert isinstance(stepped, Stepped) and stepped.lane == 0
    stand.lanes.begin(prompt(3, lane=1))
    engine.let(3)
    assert len(stand.ended(1)) == 1, "the lane goes on"


def test_a_request_that_cannot_be_started_fails_at_once(stand: Stand, engine: Gated) -> None:
    engine.failing[RequestId(2)] = ValueError("no such grammar")
    job = make_job(2, A, prompt=0, sent=(1, 2))
    run = Run(A.model, (Row(job, 0, 2, BLOCKS, 2),), 1, FOR_EVER_NS, 1)
    assert stand.lanes.begin(run) == [StepFailed("the model failed on this request (ValueError)", 1)]
    stand.lanes.begin(prompt(3, lane=1))
    engine.let(3)
    assert len(stand.ended(1)) == 1


def test_what_breaks_a_lane_breaks_the_instance(stand: Stand, engine: Gated) -> None:
    """An engine that makes too few tokens is no fault of the model: nothing may go on."""
    engine.short.add(RequestId(1))
    stand.lanes.begin(decodes(1, lane=0))
    engine.let(1)
    with pytest.raises(ValueError, match="zip"):
        stand.ended(1)


def test_heartbeats_know_what_runs(stand: Stand, engine: Gated) -> None:
    progress = Progress(stand.loop_progress)
    assert progress.lanes_ns() == (0, 0)
    stand.lanes.begin(prompt(2, lane=1))
    engine.begins()
    idle_ns, lasted_ns = progress.lanes_ns()
    assert idle_ns == 0 < lasted_ns
    idle = [(lane, 0.0) for lane in stand.loop_progress.lanes]  # their threads use no processor
    values = [progress.value(float(now), 0.0, idle) for now in range(1, 5)]
    assert values == [1, 1, 1, 1], "the main loop does not turn here, and the run waits"
    assert stand.loop_progress.hangs
    engine.let(2)
    stand.ended(1)
    assert progress.lanes_ns() == (0, 0)
    assert progress.value(6.0, 0.0, idle) == 1
    assert not stand.loop_progress.hangs


def test_heartbeats_know_of_no_lane_whose_thread_is_to_end(words: SharedWords, engine: Gated) -> None:
    stand = Stand(words, engine)
    stand.lanes.divide(HALVES)
    assert stand.loop_progress.lanes
    stand.close()
    assert not stand.loop_progress.lanes


def test_spans_say_which_lane_and_what_share(stand: Stand, engine: Gated) -> None:
    stand.lanes.begin(decodes(1, lane=0, steps=2))
    stand.lanes.begin(prompt(2, lane=1))
    engine.let(1, 2)
    engine.let(2)
    stand.ended(2)
    (told,) = stand.spans.drain()
    assert isinstance(told, Spans)
    assert {(span.kind, span.lane, span.share, span.steps) for span in told.spans} == {
        (SpanKind.DECODE, 0, 500, 2),
        (SpanKind.PREFILL, 1, 500, 1),
    }
    assert all(0 < span.stop_ns - span.start_ns < 60 * NS_PER_S for span in told.spans)


def test_a_division_that_comes_back_has_its_threads_again(stand: Stand, engine: Gated) -> None:
    before = set(threading.enumerate())
    for request in (1, 2):
        stand.lanes.divide(WHOLE)
        assert not stand.lanes.divided
        assert stand.loop_progress.lanes == ()
        stand.lanes.divide(HALVES)
        stand.lanes.begin(decodes(request, lane=1, steps=1))
        engine.let(request)
        stand.ended(1)
    assert set(threading.enumerate()) <= before


def test_without_lanes_there_is_no_thread_and_nothing_to_hear(words: SharedWords, engine: Gated) -> None:
    pool = CpuPool(8 << 20)
    device = CpuDevice(pool.address, words, threads=2)
    before = set(threading.enumerate())
    files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    spans = SpanLog(InstanceId("mixed-0"), MonotonicClock())
    lanes = Lanes(device, (WHOLE,), engine, MonotonicClock(), list, spans, LoopProgress())
    assert lanes.wakeup is None
    assert not lanes.divided
    assert lanes.drain() == []
    lanes.stop(RequestId(4))
    lanes.end_soon(0)
    assert engine.stopped == [4]
    assert set(threading.enumerate()) == before
    assert len(os.listdir("/proc/self/fd")) == files  # noqa: PTH208
    lanes.close()
    device.close()
    pool.close()


# --- with a real engine ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Built:
    config = LlamaConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    return build(config, tmp_path_factory.mktemp("models") / "llama")


class Begun:
    """One on its way."""

    def __init__(self, arena: Arena, built: Built, request: int, prompt: list[int], tokens: int) -> None:
        sampling = Sampling(max_tokens=tokens, temperature=0.0)
        self.job = Job(RequestId(request), 1, built.spec.model, tuple(prompt), sampling, 0)
        self.blocks: list[BlockRun] = [
            (int(block), int(block) + 1) for block in arena.take(built.manifest.kv, len(prompt) + tokens)
        ]
        self.cached = 0
        self.made: list[int] = []

    @property
    def prefilled(self) -> bool:
        return bool(self.made)

    @property
    def ended(self) -> bool:
        return len(self.made) == self.job.sampling.max_tokens

    def row(self, piece: int) -> Row:
        if self.made:
            return Row(self.job, self.cached, self.cached + 1, self.blocks, len(self.made), self.made[-1])
        return Row(self.job, self.cached, min(self.cached + piece, self.job.prefill_tokens), self.blocks, 0)


def test_streams_beside_pieces_of_prompts_make_the_tokens_that_they_make_alone(
    words: SharedWords, llama: Built
) -> None:
    """A small core: what is prefilled decodes on the first lane, all together and a few steps at a time; prompts run
    on the second one in pieces."""
    arena = Arena(slabs=400)
    engine = TransformersEngine(arena.region)
    engine.attach(llama.spec, llama.base)
    stand = Stand(words, engine)
    stand.lanes.divide(HALVES)
    lengths = (300, 40, 700, 17, 5, 260, 128, 1)
    sequences = [
        Begun(arena, llama, number + 1, [(7 * at + number) % 190 + 3 for at in range(length)], 24)
        for number, length in enumerate(lengths)
    ]
    under_way = dict[int, list[Begun]]()
    beside = 0

    def begin(lane: int, rows: list[Begun], steps: int) -> None:
        if rows:
            under_way[lane] = rows
            run = Run(llama.spec.model, tuple([s.row(48) for s in rows]), steps, FOR_EVER_NS, lane)
            assert stand.lanes.begin(run) == []

    def take(stepped: Stepped) -> None:
        rows = under_way.pop(stepped.lane)
        for number, sequence in enumerate(rows):
            if sequence.prefilled:
                sequence.made += [step[number].id for step in stepped.steps]
                sequence.cached += len(stepped.steps)
            else:
                sequence.cached = min(sequence.cached + 48, sequence.job.prefill_tokens)
                sequence.made += [step[number].id for step in stepped.steps]

    while not all(sequence.ended for sequence in sequences):
        free = [s for s in sequences if not s.ended and not any(s in rows for rows in under_way.values())]
        if 0 not in under_way:
            begin(0, [s for s in free if s.prefilled], 3)
        if 1 not in under_way:
            begin(1, [s for s in free if not s.prefilled][:1], 1)
        beside += len(under_way) == 2
        for answer in stand.ended(1):
            assert isinstance(answer, Stepped)
            take(answer)
    stand.close()
    assert beside > 20, "both lanes were busy"
    for sequence in sequences:
        assert sequence.made == llama.greedy(list(sequence.job.prompt), 24)
