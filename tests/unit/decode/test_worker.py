"""Runs of decode steps on a small engine that makes the next token from the one before and its position."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from aegis.core.clock import NS_PER_S
from aegis.core.effects import DecodeRow, RunDecode
from aegis.core.events import Stepped
from aegis.core.ids import ModelId, RequestId
from aegis.core.messages import Tokens
from aegis.core.model import ModelSpec
from aegis.core.request import FinishReason, Sampling, Token
from aegis.engine.protocol import EngineFailed, Row, Sampled
from aegis.sim.faults.fake_models import make_spec
from decode.worker import DecodeWorker
from tests.sim.driven import make_job

A = make_spec(0, image_pages=1, block_bytes=1024)
STEP_NS = 1_000_000
FOR_EVER_NS = 100 * NS_PER_S
BLOCKS = [(3, 5), (9, 10)]


class Adding:
    """An engine: each token is the one before it and its position, added; a step takes `STEP_NS`. It raises in the step
    that `fails_in` counts from 1. It is a clock, too."""

    def __init__(self, fails_in: int = 0) -> None:
        self.time_ns = 5 * STEP_NS
        self.batches: list[list[Row]] = []
        self._fails_in = fails_in

    def now_ns(self) -> int:
        return self.time_ns

    def prepare(self, spec: ModelSpec) -> None: ...

    def discard(self, spec: ModelSpec) -> None: ...

    def attach(self, spec: ModelSpec, weights_base: int) -> None: ...

    def detach(self, model: ModelId) -> None: ...

    def start(
        self, request: RequestId, prompt: Sequence[int], generated: Sequence[int], sampling: Sampling
    ) -> None: ...

    def stop(self, request: RequestId) -> None: ...

    def extend(self, model: ModelId, tokens: Sequence[int], blocks: object, start: int) -> bool:
        raise NotImplementedError

    def prefill(
        self, model: ModelId, request: RequestId, tokens: Sequence[int], blocks: object, start: int = 0
    ) -> Sampled:
        raise NotImplementedError

    def decode(self, model: ModelId, rows: Sequence[Row]) -> list[Sampled]:
        assert model == A.model
        self.batches.append(list(rows))
        if len(self.batches) == self._fails_in:
            raise ValueError("what the model did")
        self.time_ns += STEP_NS
        return [Sampled(Token(row.token + row.position)) for row in rows]


class Run:
    """A worker on its engine, and what it delivered: for each step its messages and when they came."""

    def __init__(self, *, ends_after: int = 0, fails_in: int = 0) -> None:
        self.engine = Adding(fails_in)
        self.delivered: list[tuple[int, list[Tokens]]] = []
        self.told = 0
        self._ends_after = ends_after
        self._worker = DecodeWorker(self.engine, self.engine, self._deliver, self._tell)

    def of(self, *rows: DecodeRow, steps: int = 50, until_ns: int = FOR_EVER_NS) -> Stepped:
        return self._worker.run(RunDecode(A.model, rows, steps, until_ns))

    @property
    def messages(self) -> list[Tokens]:
        return [message for _, messages in self.delivered for message in messages]

    def _deliver(self, messages: list[Tokens]) -> None:
        self.delivered.append((self.engine.time_ns, messages))

    def _tell(self) -> bool:
        assert len(self.delivered) == len(self.engine.batches), "what was made is on its way already"
        self.told += 1
        return self.told == self._ends_after


def row(request: int, *, token: int = 20, position: int = 30, index: int = 4, most: int = 100) -> DecodeRow:
    return DecodeRow(make_job(request, A, max_tokens=most), index, token, position, BLOCKS)


def test_each_step_goes_on_from_the_last_one() -> None:
    run = Run()
    stepped = run.of(row(1), row(2, token=50, position=8), steps=3)
    assert stepped == Stepped(
        ((Token(50), Token(58)), (Token(81), Token(67)), (Token(113), Token(77))), duration_ns=3 * STEP_NS
    )
    seen = [[(r.request, r.token, r.position) for r in batch] for batch in run.engine.batches]
    assert seen == [
        [(1, 20, 30), (2, 50, 8)],
        [(1, 50, 31), (2, 58, 9)],
        [(1, 81, 32), (2, 67, 10)],
    ]
    assert all(list(r.blocks) == [3, 4, 9] for batch in run.engine.batches for r in batch)


def test_tokens_are_delivered_as_each_step_ends() -> None:
    run = Run()
    run.of(row(1, index=4), row(2, index=9), steps=3)
    assert [at_ns for at_ns, _ in run.delivered] == [6 * STEP_NS, 7 * STEP_NS, 8 * STEP_NS]
    assert [[(m.request, m.attempt, m.first) for m in messages] for _, messages in run.delivered] == [
        [(1, 1, 4), (2, 1, 9)],
        [(1, 1, 5), (2, 1, 10)],
        [(1, 1, 6), (2, 1, 11)],
    ]
    assert all(len(m.tokens) == 1 and m.finish is None for m in run.messages)


def test_a_run_ends_with_the_last_token_of_a_row_by_its_length() -> None:
    run = Run()
    assert len(run.of(row(1, index=4), row(2, index=4, most=7)).steps) == 3
    assert [m.finish for m in run.messages] == [None] * 5 + [FinishReason.LENGTH]


def test_a_run_ends_with_the_last_token_of_a_row_by_what_it_is() -> None:
    """7 is where they stop: the first row makes it in its second step, 2 + 2 + 3."""
    run = Run()
    assert len(run.of(row(1, token=2, position=2), row(2)).steps) == 2
    assert [m.finish for m in run.messages] == [None, None, FinishReason.STOP, None]


def test_a_run_makes_as_many_steps_as_it_may_and_is_not_asked_after_the_last() -> None:
    run = Run()
    assert len(run.of(row(1), steps=4).steps) == 4 and run.told == 3


@pytest.mark.parametrize(("until_ns", "steps"), [(0, 1), (6 * STEP_NS, 1), (6 * STEP_NS + 1, 2), (9 * STEP_NS, 4)])
def test_a_run_ends_at_its_time_after_at_least_a_step(until_ns: int, steps: int) -> None:
    stepped = Run().of(row(1), until_ns=until_ns)
    assert len(stepped.steps) == steps and stepped.duration_ns == steps * STEP_NS


def test_a_run_ends_when_the_core_asks_for_it() -> None:
    run = Run(ends_after=3)
    assert len(run.of(row(1)).steps) == 3 == run.told


def test_what_was_made_before_a_step_failed_is_delivered() -> None:
    run = Run(fails_in=3)
    with pytest.raises(EngineFailed, match="ValueError"):
        run.of(row(1))
    assert [m.first for m in run.messages] == [4, 5]


def test_only_the_engine_can_fail_a_step() -> None:
    """What breaks while the core is told is a bug of ours, and no fault of the model."""
    run = Run()

    def broken() -> bool:
        raise AssertionError("a law is broken")

    worker = DecodeWorker(run.engine, run.engine, run.delivered.append, broken)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="a law is broken"):
        worker.run(RunDecode(A.model, (row(1),), 5, FOR_EVER_NS))
