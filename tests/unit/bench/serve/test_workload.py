"""The requests that a run will send."""

from itertools import pairwise
from math import inf
from pathlib import Path

import pytest

from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from bench.serve.datasets import Dataset
from bench.serve.models import Card
from bench.serve.plan import Planned
from bench.serve.settings import Settings
from bench.serve.workload import draw_times_ns, plan_for, read

SERVED = [Card("x"), Card("y")]


def planned(settings: Settings) -> list[Planned]:
    return plan_for(settings, read(settings), SERVED)


def test_a_trace_keeps_its_times_and_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,model,input_tokens,output_tokens\n0.5,b,3,4\n0.25,a,1,2\n1,b,5,6\n")
    rows = [Planned(250_000_000, ModelId("x"), 1, 2), Planned(500_000_000, ModelId("y"), 3, 4)]
    assert planned(Settings(trace=trace, num_prompts=2)) == rows


def test_a_generated_workload_is_the_seeds() -> None:
    spec = "poisson:models=2,rps=5,duration=10,lengths=fixed,input=3,output=4"
    one, same, other = (planned(Settings(workload=spec, seed=seed)) for seed in (1, 1, 2))
    assert one == same != other
    assert {each.model for each in one} == {"x", "y"}
    assert {(each.input_tokens, each.output_tokens) for each in one} == {(3, 4)}


def test_samples_go_to_all_models_in_turn_but_to_the_one_they_name(tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.write_text('{"prompt": "abcd"}\n{"prompt": "abcd", "model": "x"}\n{"prompt": "abcd"}\n{"prompt": "abcd"}\n')
    plan = planned(Settings(dataset=Dataset("custom", rows), num_prompts=4, request_rate=10.0))
    assert [each.model for each in plan] == ["x", "x", "x", "y"]
    assert {each.text for each in plan} == {"abcd"}
    assert plan == sorted(plan, key=lambda each: each.at_ns)


def test_a_data_set_has_a_thousand_requests() -> None:
    assert len(planned(Settings())) == 1000


def test_a_workload_without_requests_is_refused() -> None:
    with pytest.raises(UserError, match="no requests"):
        read(Settings(workload="poisson:models=1,rps=0.000001,duration=1"))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(3))
def test_arrivals_keep_the_rate_whatever_the_burstiness(burstiness: float, seed: int) -> None:
    times_ns = draw_times_ns(2000, 50.0, burstiness, seed)
    assert times_ns == sorted(times_ns)
    assert 2000 / 50 * 0.75 < times_ns[-1] / 1e9 < 2000 / 50 * 1.25


def test_at_an_infinite_rate_all_come_at_once() -> None:
    assert draw_times_ns(3, inf, 1.0, 0) == [0, 0, 0]


def test_less_burstiness_is_burstier() -> None:
    def longest_gap_ns(burstiness: float) -> int:
        times_ns = draw_times_ns(500, 1.0, burstiness, 0)
        return max(after - before for before, after in pairwise(times_ns))

    assert longest_gap_ns(0.1) > longest_gap_ns(1.0) > longest_gap_ns(10.0)


def test_the_slowest_rates_and_the_burstiest_gaps_have_times() -> None:
    for rate, burstiness in [(1e-9, 1e-9), (1e-9, 1.0), (1e300, 1e-9), (1e-9, 1e9)]:
        assert draw_times_ns(50, rate, burstiness, 0) == sorted(draw_times_ns(50, rate, burstiness, 0))
