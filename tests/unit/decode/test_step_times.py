"""The reports of an instance about the times of its steps, how often it sends them, and the times of changes."""

from __future__ import annotations

import pytest

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.estimators import Hardware
from aegis.core.ids import ModelId
from aegis.core.messages import StepsTook
from aegis.sim.faults.fake_models import make_spec
from decode.step_times import ChangeTimes, StepTimes

A, B = (make_spec(index, image_pages=3, block_bytes=1024) for index in range(2))


def step_times() -> StepTimes:
    """Of an instance that has both models."""
    times = StepTimes(Hardware(), ChangeTimes())
    times.add(A)
    times.add(B)
    return times


def saw(times: StepTimes, now_ns: int, *, model: ModelId = A.model, ms: int = 30) -> StepsTook | None:
    return times.saw(model, now_ns, context_tokens=100, rows=4, step_ns=ms * NS_PER_MS)


def test_it_is_said_at_once_and_then_seldom_of_each_model() -> None:
    times = step_times()
    said = [at for at in range(25) if saw(times, at * NS_PER_S // 10)]
    assert said == [0, 10, 20]
    assert saw(times, 21 * NS_PER_S // 10, model=B.model)


def test_the_part_of_the_time_that_work_accounts_for_is_said_with_it() -> None:
    changes = ChangeTimes()
    times = StepTimes(Hardware(), changes)
    times.add(A)
    for now_ns in range(0, 100 * NS_PER_S, NS_PER_S):
        changes.begins(1, now_ns, changes=False, pause=False)
        changes.counts(3 * NS_PER_S // 10, 2 * NS_PER_S // 10)
        changes.ended(NS_PER_S, now_ns + NS_PER_S, NS_PER_S)
    took = saw(times, 100 * NS_PER_S)
    assert took and took.work_share == pytest.approx(0.5, rel=1e-3)


def test_one_that_came_anew_is_told_of_at_once() -> None:
    times = step_times()
    assert saw(times, 0) and not saw(times, 1)
    times.forget(A.model)
    times.add(A)
    assert saw(times, 2)


def test_what_is_said_is_what_was_learnt_and_no_single_slow_step() -> None:
    times = step_times()
    for at in range(20):
        took = saw(times, at * NS_PER_S)
    took = saw(times, 20 * NS_PER_S, ms=3000)
    assert took and (took.model, took.context_tokens, took.rows) == (A.model, 100, 4)
    assert took.step_ns == times.latency[A.model].decode_ns(100, 4) == pytest.approx(30 * NS_PER_MS, rel=0.1)


_MS = 1_000_000


def taught(changed_ms: list[int], usual_ms: int = 0) -> ChangeTimes:
    times = ChangeTimes()
    for lost_ms in changed_ms:
        for lost, changes in ((usual_ms, False), (lost_ms, True)):
            times.begins(0, 0, changes=changes, pause=False)
            times.ended(0, lost * _MS, NS_PER_S)
    return times


def test_what_changes_take_is_learned_after_some() -> None:
    assert taught([]).ns == 0
    assert taught([100] * 50).ns == pytest.approx(100 * _MS, rel=0.01)
    assert taught([100] * 50 + [20] * 50).ns == pytest.approx(20 * _MS, rel=0.02)


def test_what_comes_before_any_run_is_none_of_it() -> None:
    assert taught([100] * 50, usual_ms=40).ns == pytest.approx(60 * _MS, rel=0.01)
    assert taught([40] * 50, usual_ms=40).ns == 0


def test_what_makes_no_difference_to_turns_is_none() -> None:
    assert taught([4] * 50).ns == 0


class Runs:
    """Runs of 10 ms of two batches, with so much time before each."""

    def __init__(self) -> None:
        self.times = ChangeTimes()
        self.now_ns = 0

    def run(self, batch: int, after_ms: int, *, pause: bool = False) -> None:
        self.now_ns += after_ms * _MS
        self.times.begins(batch, self.now_ns, changes=True, pause=pause)
        self.now_ns += 10 * _MS
        self.times.ended(10 * _MS, self.now_ns, NS_PER_S)

    @property
    def stall_ms(self) -> float | None:
        return None if self.times.stall_ns is None else self.times.stall_ns / _MS


def test_what_turns_begin_with_is_learned() -> None:
    runs = Runs()
    runs.run(1, 500)
    assert runs.stall_ms is None, "nobody waited before the first run"
    for _ in range(10):
        runs.run(2, 80)
        runs.run(2, 7)
        runs.run(1, 80)
    assert runs.stall_ms == 80, "only what came before another batch's run"
    for _ in range(200):
        runs.run(2, 40)
        runs.run(1, 40)
    assert runs.stall_ms == pytest.approx(40, rel=0.01)


def test_pauses_and_idle_time_are_no_stalls() -> None:
    runs = Runs()
    runs.run(1, 0)
    runs.run(2, 20)
    runs.run(1, 300, pause=True)
    runs.run(2, 300)
    runs.times.idle()
    runs.run(1, 5000)
    assert runs.stall_ms == 20


def test_two_batches_go_on_at_a_time_for_a_part_of_the_runs() -> None:
    """A run beside is told of when it is over, be it one that lasts for several of the turn's."""
    runs = Runs()
    for _ in range(200):
        for run in range(4):
            if run == 3:
                runs.times.ran_beside(20 * _MS)
            runs.run(1, 10)
    assert runs.times.abreast == pytest.approx(0.5, abs=0.02), "20 of 40 ms, whatever is between the runs"
    for _ in range(1_000):
        runs.times.ran_beside(30 * _MS)
        runs.times.counts(30 * _MS)
        runs.run(1, 0)
    assert runs.times.abreast == pytest.approx(1, abs=0.01), "never more"
    assert runs.times.steps_share == pytest.approx(2, abs=0.01), "nor more than both of them can have"
    assert runs.times.work_share == pytest.approx(3, abs=0.01), "which estimates may say all the same"


def test_the_share_of_the_time_that_steps_account_for_is_an_average_over_the_window() -> None:
    runs = Runs()
    assert runs.times.steps_share == 1
    for _ in range(500):
        runs.times.counts(5 * _MS)
        runs.run(1, 10)
    assert runs.times.steps_share == pytest.approx(0.25, rel=0.01), "5 of each 20 ms"
    for _ in range(35):
        runs.times.counts(15 * _MS)
        runs.run(1, 10)
    assert 0.45 < runs.times.steps_share < 0.55, "half of the way to 0.75, after 0.7 windows"
    runs.times.idle()
    before = runs.times.steps_share
    runs.times.counts(before * 10 * _MS)
    runs.run(1, 100_000)
    assert runs.times.steps_share == pytest.approx(before), "where there is no work no time is lost"


def test_prompts_are_work_and_no_steps() -> None:
    runs = Runs()
    assert runs.times.work_share == 1
    for _ in range(500):
        runs.times.counts(5 * _MS, 3 * _MS)
        runs.times.counts(0, 2 * _MS)
        runs.run(1, 10)
    assert runs.times.steps_share == pytest.approx(0.25, rel=0.01)
    assert runs.times.work_share == pytest.approx(0.5, rel=0.01)


def test_a_prompt_beside_that_ends_when_there_is_no_work_is_not_all_of_the_next_run() -> None:
    runs = Runs()
    for _ in range(1000):
        runs.times.idle()
        runs.times.counts(0, 1000 * _MS)
        runs.run(1, 10)
    assert runs.times.work_share == 1
