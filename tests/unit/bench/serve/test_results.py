"""Figures, worked out by hand."""

from typing import Any

import pytest

from aegis.core.ids import ModelId
from aegis.core.model import Slo
from bench.serve.plan import Outcome, Planned, digest
from bench.serve.results import METRICS, Measures, summarise
from bench.serve.suite import record_of

MS = 1_000_000
A, B = ModelId("a"), ModelId("b")
SLO = Slo(ttft_ns=100 * MS, tbt_ns=10 * MS)


def outcome(
    request: int, at_ms: int, came_ms: tuple[int, ...], *, model: ModelId = A, asked: int = 4, **changes: Any
) -> Outcome:
    """Sent 10 ms after its time; ended with its last token."""
    fields: dict[str, Any] = {
        "late_ns": MS,
        "sent_ns": (at_ms + 10) * MS,
        "stop_ns": max(came_ms, default=at_ms + 20) * MS,
        "input_tokens": 8,
        "token_times_ns": tuple(ms * MS for ms in came_ms),
        "finish": "length",
    }
    return Outcome(request, Planned(at_ms * MS, model, 9, asked), **fields | changes)


OUTCOMES = [
    outcome(0, 0, (100, 110, 125, 125)),  # due at 100, 110, 120, 130
    outcome(1, 500, (560, 660), model=B, finish="stop", late_ns=3 * MS),  # due at 600 and 610
    outcome(2, 900, (1000,), failure="HTTP 500: out"),
]


def test_a_run() -> None:
    result = summarise(OUTCOMES, Measures(slo=SLO, metrics=METRICS, percentiles=(50, 99.9)))
    assert result["duration"] == 1.0
    assert (result["completed"], result["failed"], result["failures"]) == (2, 1, {"HTTP 500: out": 1})
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (16, 6)
    assert (result["request_throughput"], result["output_throughput"], result["total_token_throughput"]) == (2, 6, 22)
    assert (result["max_output_tokens_per_s"], result["max_concurrent_requests"]) == (6, 1)
    assert (result["slo_tokens_met"], result["slo_tokens"]) == (4, 10)
    assert result["slo_attainment"] == 0.4
    assert result["request_goodput"] is None
    assert (result["mean_lateness_ms"], result["max_lateness_ms"]) == (pytest.approx(5 / 3), 3)
    assert (result["mean_ttft_ms"], result["std_ttft_ms"], result["p50_ttft_ms"]) == (70, 20, 70)
    assert result["mean_tpot_ms"] == pytest.approx((25 / 3 + 100) / 2)
    assert result["mean_itl_ms"] == pytest.approx((10 + 15 + 100) / 3)
    assert result["mean_e2el_ms"] == (115 + 150) / 2
    assert result["p99.9_ttft_ms"] == pytest.approx(89.96)


def test_each_model_has_its_own_figures() -> None:
    per_model = summarise(OUTCOMES, Measures(slo=SLO))["per_model"]
    assert list(per_model) == ["a", "b"]
    assert (per_model["a"]["completed"], per_model["a"]["failed"]) == (1, 1)
    assert per_model["b"]["slo_attainment"] == 0.5
    assert per_model["a"]["mean_ttft_ms"] == 90
    assert per_model["a"]["output_throughput"] + per_model["b"]["output_throughput"] == 6


@pytest.mark.parametrize(
    ("limits_ms", "good"), [({"ttft": 90}, 2), ({"ttft": 89}, 1), ({"tpot": 50}, 1), ({"e2el": 115, "ttft": 1}, 0)]
)
def test_goodput_counts_requests_that_keep_all_limits(limits_ms: dict[str, float], good: int) -> None:
    assert summarise(OUTCOMES, Measures(goodput=limits_ms))["request_goodput"] == good


def test_requests_overlap_from_sending_to_the_end() -> None:
    def peak(*spans: tuple[int, int]) -> Any:
        each = [outcome(0, start, (start + 15, stop)) for start, stop in spans]
        return summarise(each, Measures())["max_concurrent_requests"]

    assert peak((0, 100), (50, 200), (80, 300)) == 3
    assert peak((0, 100), (90, 200)) == 1  # the one ends as the other is sent


@pytest.mark.parametrize(
    ("finish", "failure", "owed", "on_time"),
    [("length", "", 4, 2), ("stop", "", 2, 2), ("", "", 2, 2), ("length", "broke", 4, 0), ("", "broke", 4, 0)],
)
def test_what_is_owed(finish: str, failure: str, owed: int, on_time: int) -> None:
    short = outcome(0, 0, (50, 60), finish=finish, failure=failure)
    assert (short.owed_tokens, short.on_time(SLO)) == (owed, on_time)


def test_waiting_for_others_at_the_client_is_no_excuse() -> None:
    late = outcome(0, 0, (250, 260), sent_ns=200 * MS, finish="stop")
    assert (late.ttft_ns, late.on_time(SLO)) == (50 * MS, 0)


def test_a_run_of_which_nothing_came() -> None:
    result = summarise([outcome(0, 0, (), failure="gone")], Measures(goodput={"ttft": 1.0}))
    assert (result["completed"], result["failed"], result["slo_attainment"]) == (0, 1, 0)
    assert (result["mean_ttft_ms"], result["p99_itl_ms"], result["request_goodput"]) == (0, 0, 0)


def test_records_add_up_to_the_attainment() -> None:
    records = [record_of(each, SLO) for each in OUTCOMES]
    result = summarise(OUTCOMES, Measures(slo=SLO))
    assert sum(record.on_time for record in records) == result["slo_tokens_met"]
    assert sum(record.output_tokens for record in records) == result["slo_tokens"]
    assert [record.ended for record in records] == ["finished", "finished", "failed"]
    assert (records[0].first_ns, records[0].last_ns, records[0].arrival_ns) == (100 * MS, 125 * MS, 0)


def test_runs_of_the_same_requests_have_the_same_digest() -> None:
    plan = [each.planned for each in OUTCOMES]
    assert digest(plan) == digest(list(plan))
    assert digest(plan) != digest(plan[:2])
    assert digest(plan) != digest([*plan[:2], Planned(900 * MS, A, 9, 5)])
