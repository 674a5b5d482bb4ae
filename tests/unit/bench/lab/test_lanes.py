"""The instrument of lanes on a small model, and how its ratios are made."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from aegis.core.errors import UserError
from bench.lab.lanes import Plan, Result, Round, Took, run, step_processor_s, step_s

ROUND = Round(
    decode_one=Took(10, 1.0, 0.9),
    prefill_one=Took(1, 4.0, 4.0),
    decode_two=Took(10, 0.8, 0.7),
    prefill_two=Took(1, 2.0, 2.0),
    decode_beside=Took(20, 2.5, 2.0),
    prefill_beside=Took(1, 5.0, 4.5),
    p99_s=0.2,
)


def test_ratios_are_of_steps_and_prompts_beside_each_other_against_alone_and_turns() -> None:
    """In 5 s the lanes make a prompt and 40 steps; turns take 2 s for the prompt and 3.2 s for the steps."""
    assert ROUND.decode_keeps(step_s) == pytest.approx(0.1 / 0.125)
    assert ROUND.prefill_keeps(step_s) == pytest.approx(0.8)
    assert ROUND.work == pytest.approx((2.0 + 40 * 0.08) / 5.0)
    assert ROUND.decode_keeps(step_processor_s) == pytest.approx(0.9)
    assert ROUND.prefill_keeps(step_processor_s) == pytest.approx(4.0 / 4.5)


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")
def test_it_measures_both_beside_each_other(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    plan = Plan(checkpoint="tiny", batches=(2,), context=64, prompt_tokens=512, rounds=1)
    result = run(tmp_path / "lanes.json", plan)
    (case,) = result.cases
    (measured,) = case.rounds
    assert measured.decode_beside.steps >= 1
    assert 0 < measured.prefill_beside.processor_s <= 1.1 * measured.prefill_beside.s
    assert msgspec.json.decode((tmp_path / "lanes.json").read_bytes(), type=Result).cases == result.cases
    assert os.sched_getaffinity(0) == cores


def test_one_core_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with pytest.raises(UserError, match="two cores"):
        run(None, Plan())
