"""Searches for the most models and the fewest GPUs."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.model import Slo
from bench.simulate.cells import search as search_module
from bench.simulate.cells.search import Aim, Probe, Search, boundary, end_of
from bench.simulate.setting import Setting
from bench.simulate.sweep import GOAL, Crossing
from bench.simulate.tuning import Knob, Tuned

STEP = 2


@given(
    end=st.integers(0, 600),
    start=st.integers(1, 128),
    width=st.integers(1, 64),
)
def test_the_end_of_what_is_true_is_found_in_few_steps(end: int, start: int, width: int) -> None:
    tried: list[int] = []

    def goes_on(at: int) -> bool:
        tried.append(at)
        return at < end

    low, high = boundary(goes_on, start=STEP * start, width=STEP * width, step=STEP, limit=512)
    assert low == 0 or low < end
    assert (high is None and low == 512) or (high == low + STEP and high >= end)
    assert len(tried) == len(set(tried)) <= 20
    assert all(0 < at <= 512 and at % STEP == 0 for at in tried)


@given(st.lists(st.booleans(), min_size=16, max_size=16), st.integers(1, 16))
def test_of_what_ends_more_than_once_some_end_is_found(truths: list[bool], start: int) -> None:
    low, high = boundary(lambda at: truths[at - 1], start=start, width=1, step=1, limit=16)
    assert low == 0 or truths[low - 1]
    assert high is None or not truths[high - 1]


def search(aim: Aim, setting: Setting, *, start: int = 2, width: int = 2, step: int = 2, limit: int = 64) -> Search:
    return Search(aim=aim, setting=setting, start=start, width=width, step=step, limit=limit)


def test_models_are_on_the_line_between_the_probes_beside_the_goal() -> None:
    setting = Setting(policy="serverlessllm", workload="poisson:rps=0.2,duration=30", mixed=1, seed=3)
    found = search(Aim.MODELS, setting).found()
    assert found.seed == 3
    assert [probe.at for probe in found.probes] == sorted({probe.at for probe in found.probes})
    low = max(probe.at for probe in found.probes if probe.attainment >= GOAL)
    high = min(probe.at for probe in found.probes if probe.attainment < GOAL)
    assert found.at.at is not None
    assert (high - low, low < found.at.at <= high) == (2, True)


def test_where_all_is_on_time_up_to_the_limit_the_answer_lies_behind_it() -> None:
    setting = Setting(policy="dedicated", workload="poisson:rps=0.2,duration=5", mixed=8)
    assert search(Aim.MODELS, setting, limit=8).found().at == Crossing(above=8)


@pytest.mark.parametrize(("slo", "gpus"), [(Slo(), 3), (Slo(ttft_ns=1), None)])
def test_dedicated_needs_a_gpu_for_each_model(slo: Slo, gpus: int | None, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{second},{name},100,20" for second, name in enumerate(("a", "b", "c") * 3)]
    trace.write_text("\n".join(["arrival_s,model,input_tokens,output_tokens", *rows]))
    setting = Setting(policy="dedicated", trace=str(trace), slo=slo)
    found = search(Aim.GPUS, setting, start=1, width=1, step=1, limit=6).found()
    assert found.at == (Crossing(above=6) if gpus is None else Crossing(at=gpus))
    if gpus:
        shares = {probe.at: (probe.attainment, probe.ttft_attainment) for probe in found.probes}
        assert (shares[2], shares[3]) == ((2 / 3, 2 / 3), (1, 1))


def test_where_prefill_is_apart_one_gpu_is_not_enough() -> None:
    setting = Setting(policy="aegaeon", workload="poisson:models=1,rps=0.2,duration=10")
    found = search(Aim.GPUS, setting, start=1, width=1, step=1, limit=4).found()
    assert found.at == Crossing(at=2)
    assert [probe.attainment for probe in found.probes] == [0, 1]


CROWD = Setting(policy="serverlessllm", workload="poisson:rps=0.4,duration=40", mixed=1)


def test_who_is_tuned_serves_more_and_what_was_tried_is_kept() -> None:
    knob = Knob("max_batch", (1, 8, 64), 1)
    plain = search(Aim.MODELS, replace(CROWD, max_batch=1)).found()
    found = replace(search(Aim.MODELS, CROWD), knobs=(knob,)).found()
    assert found.tuned and found.tuned.parameters["max_batch"] > 1
    assert end_of(found.at) > end_of(plain.at)
    assert found.tuned.probes[0].parameters == {"max_batch": 1}
    assert found.tuned.probes[0].at in {probe.at for probe in plain.probes} | {4, 6, 8}
    assert found.tuned.probes[0].attainment < 1 <= max(probe.attainment for probe in found.tuned.probes)


def test_another_seed_has_the_same_parameters_and_nothing_is_tuned_again() -> None:
    given = replace(search(Aim.MODELS, CROWD), knobs=(Knob("max_batch", (1, 64), 64),), parameters={"max_batch": 1})
    found = given.found()
    assert found.tuned == Tuned({"max_batch": 1}, ())
    assert found.at == search(Aim.MODELS, replace(CROWD, max_batch=1)).found().at


def test_who_misses_the_goal_where_the_best_ends_is_searched_no_further_and_others_to_their_end() -> None:
    tuned = replace(search(Aim.MODELS, CROWD), knobs=(Knob("max_batch", (8, 64), 64),))
    found = tuned.found()
    end = int(end_of(found.at))
    missed = replace(tuned, screen_at=end // 2 * 2 + 2).found()
    assert missed.at == Crossing(below=end // 2 * 2 + 2) and missed.probes[0].attainment < GOAL
    assert missed.tuned and [probe.parameters["max_batch"] for probe in missed.tuned.probes] == [64, 8]
    assert replace(tuned, screen_at=end // 2 * 2).found() == found
    again = replace(tuned, screen_at=end // 2 * 2 + 2, parameters={"max_batch": 8}).found()
    assert again.at == missed.at and again.tuned == Tuned({"max_batch": 8}, ())


def test_who_reaches_the_goal_where_the_best_ends_is_no_worse_than_what_was_seen_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A curve may cross the goal before, too, and the search finds that crossing first."""
    misses = {4, 12, 14, 16}

    def probe(_: object, at: int, __: object) -> Probe:
        return Probe(at, 0.5 if at in misses else 1.0, 1.0)

    monkeypatch.setattr(search_module._Tried, "_simulated", probe)
    plain = search(Aim.MODELS, CROWD, limit=16)
    assert end_of(plain.found().at) == pytest.approx(2.4)
    assert end_of(replace(plain, screen_at=8).found().at) == pytest.approx(10.4)


def test_nobody_loses_by_being_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where knobs are turned, worse ones may look better."""
    monkeypatch.setattr(search_module, "climb", lambda knobs, score, start, enough: Tuned({"max_batch": 1}, ()))
    plain = search(Aim.MODELS, CROWD).found()
    found = replace(search(Aim.MODELS, CROWD), knobs=(Knob("max_batch", (1, 64), 64),)).found()
    assert found.at == plain.at and found.tuned == Tuned({"max_batch": 64}, ())


def test_the_split_that_needs_the_fewest_gpus_is_found() -> None:
    setting = Setting(policy="aegaeon", workload="poisson:models=6,rps=0.5,duration=40", slo=Slo(ttft_ns=2 * 10**9))
    wide = Knob("prefill_share", (0.125, 0.25, 0.375, 0.5, 0.75), 0.75)
    plain = search(Aim.GPUS, replace(setting), start=3, width=1, step=1, limit=12)
    untuned = replace(plain, knobs=(Knob("prefill_share", (0.75,), 0.75),)).found()
    found = replace(plain, knobs=(wide,)).found()
    assert found.tuned and found.tuned.parameters["prefill_share"] < 0.75
    assert found.at.at and untuned.at.at and found.at.at < untuned.at.at
