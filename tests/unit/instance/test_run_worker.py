"""Runs on a small engine that makes the next token from the one before and its position."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from aegis.core.clock import NS_PER_S
from aegis.core.effects import Row, Run
from aegis.core.events import Stepped
from aegis.core.ids import ModelId, RequestId
from aegis.core.messages import Broken, Tokens
from aegis.core.model import ModelSpec
from aegis.core.request import SLOW, Failure, FinishReason, Sampling, Token
from aegis.engine.protocol import EngineFailed, Sampled, StepRow
from aegis.instance.run_worker import Delivered, RunWorker
from aegis.sim.faults.fake_models import make_spec
from tests.sim.driven import make_job

A = make_spec(0, image_pages=1, block_bytes=1024)
STEP_NS = 1_000_000
FOR_EVER_NS = 100 * NS_PER_S
BLOCKS = [(3, 5), (9, 10)]


class Adding:
    """An engine: each token is the last one of its row and its position, added; a step takes `STEP_NS`. It raises in
    the step that `fails_in` counts from 1. It is a clock, too."""

    def __init__(self, fails_in: int = 0, *, extends: bool = True) -> None:
        self.time_ns = 5 * STEP_NS
        self.steps: list[list[StepRow]] = []
        self.started: list[tuple[object, ...]] = []
        self.problems = dict[RequestId, Failure]()
        self._fails_in = fails_in
        self._extends = extends

    def now_ns(self) -> int:
        return self.time_ns

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
        self.started.append((request, tuple(prompt), tuple(generated)))

    def stop(self, request: RequestId) -> None: ...

    def extends(self, model: ModelId) -> bool:
        return self._extends

    def step(self, model: ModelId, rows: Sequence[StepRow]) -> list[Sampled | None]:
        assert model == A.model
        self.steps.append(list(rows))
        if len(self.steps) == self._fails_in:
            raise ValueError("what the model did")
        self.time_ns += STEP_NS
        reports = (Token(5),) if rows[0].start == 0 else ()
        made = [Sampled(Token(row.tokens[-1] + row.stop - 1), reports, self.problems.get(row.request)) for row in rows]
        return [each if row.samples else None for row, each in zip(rows, made, strict=True)]


class Played:
    """A worker on its engine, and what it delivered: for each step its messages and when they came."""

    def __init__(self, *, ends_after: int = 0, fails_in: int = 0, extends: bool = True) -> None:
        self.engine = Adding(fails_in, extends=extends)
        self.delivered: list[tuple[int, list[Delivered]]] = []
        self.told = 0
        self._ends_after = ends_after
        self._worker = RunWorker(self.engine, self.engine, self._deliver, self._tell)

    def of(self, *rows: Row, steps: int = 50, until_ns: int = FOR_EVER_NS) -> Stepped:
        return self._worker.run(Run(A.model, rows, steps, until_ns))

    @property
    def messages(self) -> list[Delivered]:
        return [message for _, messages in self.delivered for message in messages]

    @property
    def seen(self) -> list[list[tuple[object, ...]]]:
        """What the engine saw: requests, their tokens, where those begin, and whether they sample."""
        return [[(r.request, tuple(r.tokens), r.start, r.samples) for r in step] for step in self.engine.steps]

    def _deliver(self, messages: list[Delivered]) -> None:
        self.delivered.append((self.engine.time_ns, messages))

    def _tell(self) -> bool:
        assert len(self.delivered) == len(self.engine.steps), "what was made is on its way already"
        self.told += 1
        return self.told == self._ends_after


def row(request: int, *, token: int = 20, position: int = 30, index: int = 4, most: int = 100) -> Row:
    return Row(make_job(request, A, max_tokens=most), position, position + 1, BLOCKS, index, token)


PROMPT = make_job(9, A, prompt=30, sent=(8, 9))
TOKENS = (*PROMPT.prompt, 8, 9)


def piece(start: int, stop: int) -> Row:
    return Row(PROMPT, start, stop, BLOCKS, 2)


def test_each_step_goes_on_from_the_last_one() -> None:
    run = Played()
    stepped = run.of(row(1), row(2, token=50, position=8), steps=3)
    assert stepped == Stepped(
        ((Token(50), Token(58)), (Token(81), Token(67)), (Token(113), Token(77))), duration_ns=3 * STEP_NS
    )
    assert run.seen == [
        [(1, (20,), 30, True), (2, (50,), 8, True)],
        [(1, (50,), 31, True), (2, (58,), 9, True)],
        [(1, (81,), 32, True), (2, (67,), 10, True)],
    ]
    assert all(list(r.blocks) == [3, 4, 9] for step in run.engine.steps for r in step)


def test_tokens_are_delivered_as_each_step_ends() -> None:
    run = Played()
    run.of(row(1, index=4), row(2, index=9), steps=3)
    assert [at_ns for at_ns, _ in run.delivered] == [6 * STEP_NS, 7 * STEP_NS, 8 * STEP_NS]
    assert [[(m.request, m.attempt, m.first) for m in messages] for _, messages in run.delivered] == [
        [(1, 1, 4), (2, 1, 9)],
        [(1, 1, 5), (2, 1, 10)],
        [(1, 1, 6), (2, 1, 11)],
    ]
    assert all(len(m.tokens) == 1 and m.finish is None for m in run.messages)


def test_a_run_ends_with_the_last_token_of_a_row_by_its_length() -> None:
    run = Played()
    assert len(run.of(row(1, index=4), row(2, index=4, most=7)).steps) == 3
    assert [m.finish for m in run.messages] == [None] * 5 + [FinishReason.LENGTH]


def test_a_run_ends_with_the_last_token_of_a_row_by_what_it_is() -> None:
    """7 is where they stop: the first row makes it in its second step, 2 + 2 + 3."""
    run = Played()
    assert len(run.of(row(1, token=2, position=2), row(2)).steps) == 2
    assert [m.finish for m in run.messages] == [None, None, FinishReason.STOP, None]


def test_a_run_makes_as_many_steps_as_it_may_and_is_not_asked_after_the_last() -> None:
    run = Played()
    assert len(run.of(row(1), steps=4).steps) == 4 and run.told == 3


@pytest.mark.parametrize(("until_ns", "steps"), [(0, 1), (6 * STEP_NS, 1), (6 * STEP_NS + 1, 2), (9 * STEP_NS, 4)])
def test_a_run_ends_at_its_time_after_at_least_a_step(until_ns: int, steps: int) -> None:
    stepped = Played().of(row(1), until_ns=until_ns)
    assert len(stepped.steps) == steps and stepped.duration_ns == steps * STEP_NS


def test_a_run_ends_when_the_core_asks_for_it() -> None:
    run = Played(ends_after=3)
    assert len(run.of(row(1)).steps) == 3 == run.told


def test_what_was_made_before_a_step_failed_is_delivered() -> None:
    run = Played(fails_in=3)
    with pytest.raises(EngineFailed, match="ValueError"):
        run.of(row(1))
    assert [m.first for m in run.messages] == [4, 5]


def test_a_row_with_a_problem_is_broken_and_the_others_have_their_tokens() -> None:
    """The core counts it like the others, until the proxy cancels it."""
    run = Played()
    run.engine.problems = {RequestId(2): Failure.SLOW_GRAMMAR}
    stepped = run.of(row(1), row(2, token=50, position=8), steps=3)
    assert stepped == Stepped(((Token(50), Token(58)),), duration_ns=STEP_NS)
    broken = Broken(RequestId(2), 1, SLOW[Failure.SLOW_GRAMMAR], Failure.SLOW_GRAMMAR)
    assert run.messages == [Tokens(RequestId(1), 1, 4, (Token(50),), None), broken]


def test_only_the_engine_can_fail_a_step() -> None:
    """What breaks while the core is told is a bug of ours, and no fault of the model."""
    run = Played()

    def broken() -> bool:
        raise AssertionError("a law is broken")

    worker = RunWorker(run.engine, run.engine, run.delivered.append, broken)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="a law is broken"):
        worker.run(Run(A.model, (row(1),), 5, FOR_EVER_NS))


def test_a_prompt_starts_its_request_and_is_reported_by_the_core() -> None:
    run = Played()
    assert run.of(piece(0, 32)) == Stepped(((Token(9 + 31),),), STEP_NS, (Token(5),))
    assert run.engine.started == [(9, PROMPT.prompt, (8, 9))]
    assert run.seen == [[(9, TOKENS, 0, True)]]
    assert not run.delivered and not run.told


def test_pieces_start_it_once_and_sample_at_the_end() -> None:
    run = Played()
    stepped = [run.of(piece(*part)) for part in ((0, 16), (16, 31), (31, 32))]
    assert stepped == [Stepped((), STEP_NS), Stepped((), STEP_NS), Stepped(((Token(40),),), STEP_NS)]
    assert len(run.engine.started) == 1
    seen = [(TOKENS[:16], 0, False), (TOKENS[16:31], 16, False), (TOKENS[31:], 31, True)]
    assert run.seen == [[(9, *each)] for each in seen]


def test_rows_that_decode_beside_prompts_make_one_token_each() -> None:
    """Which leaves at once; what prompts made is the core's to tell."""
    run = Played()
    assert run.of(piece(16, 32), piece(0, 16), row(1), row(2, token=50, position=8), steps=1) == Stepped(
        ((Token(40), Token(50), Token(58)),), STEP_NS
    )
    assert run.seen == [
        [(9, TOKENS[16:], 16, True), (9, TOKENS[:16], 0, False), (1, (20,), 30, True), (2, (50,), 8, True)]
    ]
    assert [(m.request, m.tokens) for m in run.messages] == [(1, (Token(50),)), (2, (Token(58),))]
    assert not run.told


def test_what_does_not_extend_runs_whole_and_alone_with_its_last_piece() -> None:
    run = Played(extends=False)
    assert run.of(piece(0, 16)) == Stepped((), 0)
    assert run.of(piece(16, 32), row(1), row(2), steps=1).steps == ((Token(40), Token(50), Token(50)),)
    assert run.seen == [[(9, TOKENS, 0, True)], [(1, (20,), 30, True), (2, (20,), 30, True)]]
    assert len(run.engine.started) == 1


@pytest.mark.parametrize("stop", [16, 32])
def test_what_the_engine_raises_for_a_prompt_is_its_failure_too(stop: int) -> None:
    with pytest.raises(EngineFailed):
        Played(fails_in=1).of(piece(0, stop))
