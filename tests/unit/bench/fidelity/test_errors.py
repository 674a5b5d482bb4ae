"""The errors of a simulation, request by request and in all."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from aegis.core.ids import ModelId, RequestId
from aegis.telemetry.records import Record
from bench.fidelity.errors import compare


def record(number: int, model: str, first_ms: int, last_ms: int, *, ended: str = "finished", at_ms: int = 0) -> Record:
    times = [(at_ms + number + after) * 1_000_000 for after in (0, first_ms, last_ms)]
    return Record(RequestId(number), ModelId(model), times[0], 1, 2, ended, 2, times[1], times[2])


def test_equal_runs_differ_by_nothing_whatever_their_clocks_and_numbers() -> None:
    live = [record(n, "ab"[n % 2], 10 + n, 100 + n) for n in range(10)]
    simulated = [record(n, "ab"[n % 2], 10 + n, 100 + n, at_ms=5_000) for n in range(10)]
    whole, per_model = compare(live, list(reversed(simulated)))
    assert (whole.requests, whole.e2e_mean_error, whole.each_e2e_error, whole.ttft_p99_error) == (10, 0, 0, 0)
    assert list(per_model) == ["a", "b"]
    assert per_model[ModelId("b")].live_e2e_mean_ms == pytest.approx(105)


def test_errors_of_single_requests_do_not_make_up_for_each_other() -> None:
    live = [record(0, "a", 10, 100), record(1, "a", 10, 100)]
    whole, _ = compare(live, [record(0, "a", 10, 50), record(1, "a", 10, 150)])
    assert (whole.e2e_mean_error, whole.each_e2e_error) == (pytest.approx(0), pytest.approx(0.5))


def test_the_tail_is_that_of_all_requests() -> None:
    live = [record(n, "a", 1 + n, 200) for n in range(101)]
    simulated = [record(n, "a", 2 * (1 + n), 400) for n in range(101)]
    whole, _ = compare(live, simulated)
    assert (whole.live_ttft_p99_ms, whole.sim_ttft_p99_ms) == (pytest.approx(100), pytest.approx(200))
    assert (whole.ttft_p99_error, whole.e2e_mean_error) == (pytest.approx(1.0), pytest.approx(1.0))


def test_a_request_that_failed_is_left_out_on_both_sides() -> None:
    live = [record(0, "a", 10, 100), record(1, "a", 10, 100, ended="failed")]
    whole, _ = compare(live, [record(0, "a", 20, 200), record(1, "a", 10, 100)])
    assert (whole.requests, whole.e2e_mean_error) == (1, pytest.approx(1.0))


def test_tokens_on_time_are_shares_of_all_that_were_asked_for() -> None:
    def answered(number: int, on_time: int, ended: str = "finished") -> Record:
        return replace(record(number, "a", 10, 100, ended=ended), output_tokens=10, on_time=on_time)

    live = [answered(0, 10), answered(1, 5), answered(2, 0, "failed")]
    whole, per_model = compare(live, [answered(0, 10), answered(1, 8), answered(2, 3)])
    assert (whole.requests, whole.live_on_time, whole.sim_on_time) == (2, 0.5, 0.7)
    assert whole.on_time_error == pytest.approx(0.2)
    assert per_model[ModelId("a")] == whole
