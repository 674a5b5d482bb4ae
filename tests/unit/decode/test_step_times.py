"""How often an instance says how long its steps take, and what it says."""

from __future__ import annotations

import pytest

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.estimators import Hardware, Latency
from aegis.core.ids import ModelId
from aegis.core.messages import StepsTook
from aegis.sim.faults.pretended import make_spec
from decode.step_times import StepTimes

A, B = ModelId("a"), ModelId("b")


def latency() -> Latency:
    return Latency(make_spec(0, image_pages=3, block_bytes=1024).manifest, Hardware())


def saw(times: StepTimes, of: Latency, now_ns: int, *, model: ModelId = A, ms: int = 30) -> StepsTook | None:
    return times.saw(model, of, now_ns, context_tokens=100, rows=4, step_ns=ms * NS_PER_MS)


def test_it_is_said_at_once_and_then_seldom_of_each_model() -> None:
    times, of = StepTimes(), latency()
    said = [at for at in range(25) if saw(times, of, at * NS_PER_S // 10)]
    assert said == [0, 10, 20]
    assert saw(times, of, 21 * NS_PER_S // 10, model=B)


def test_one_that_came_anew_is_told_of_at_once() -> None:
    times, of = StepTimes(), latency()
    assert saw(times, of, 0) and not saw(times, of, 1)
    times.forget(A)
    assert saw(times, of, 2)


def test_what_is_said_is_what_was_learnt_and_no_single_slow_step() -> None:
    times, of = StepTimes(), latency()
    for at in range(20):
        took = saw(times, of, at * NS_PER_S)
    took = saw(times, of, 20 * NS_PER_S, ms=3000)
    assert took and (took.model, took.context_tokens, took.rows) == (A, 100, 4)
    assert took.step_ns == of.decode_ns(100, 4) == pytest.approx(30 * NS_PER_MS, rel=0.1)
