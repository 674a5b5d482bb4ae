from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.ids import ModelId, RequestId
from aegis.core.model import Slo
from aegis.core.request import FinishReason
from aegis.telemetry.metrics.requests import Metrics
from aegis.telemetry.model_counts import Tally

M = ModelId("m")
R, R2 = RequestId(1), RequestId(2)
SLO = Slo(ttft_ns=1000 * NS_PER_MS, tbt_ns=100 * NS_PER_MS)


def arrived(*requests: RequestId, max_tokens: int = 10, now_ns: int = 0) -> Metrics:
    metrics = Metrics()
    for request in requests:
        metrics.arrived(request, M, SLO, now_ns, prompt_tokens=7, max_tokens=max_tokens)
    return metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"aegis:{name}", labels)


def of_model(metrics: Metrics, name: str, **labels: str) -> float | None:
    return value(metrics, name, model_name="m", **labels)


def queue(metrics: Metrics) -> tuple[float | None, float | None]:
    return of_model(metrics, "num_requests_waiting"), of_model(metrics, "num_requests_running")


def test_a_request_is_waiting_or_running_until_it_ends() -> None:
    metrics = arrived(R, R2)
    assert queue(metrics) == (2, 0)
    metrics.started(R, NS_PER_S)
    assert queue(metrics) == (1, 1)
    metrics.phase([R], running=False)
    assert queue(metrics) == (2, 0)
    metrics.phase([R], running=True)
    metrics.finished(R, FinishReason.STOP, 2 * NS_PER_S)
    assert queue(metrics) == (1, 0)
    metrics.cancelled(R2)
    assert queue(metrics) == (0, 0)
    assert of_model(metrics, "request_success_total", finished_reason="stop") == 1
    assert of_model(metrics, "request_failure_total", reason="cancelled") == 1


def test_who_was_refused_after_it_was_taken_is_no_failure_of_the_server() -> None:
    """Which people are woken for."""
    metrics = arrived(R, R2)
    metrics.failed(R, refused=True)
    assert of_model(metrics, "request_failure_total", reason="refused") == 1
    assert of_model(metrics, "request_failure_total", reason="failed") is None
    metrics.failed(R2)
    assert of_model(metrics, "request_failure_total", reason="failed") == 1
    assert queue(metrics) == (0, 0)


def test_times_are_those_of_the_request_s_life() -> None:
    metrics = arrived(R, now_ns=5 * NS_PER_S)
    metrics.started(R, 6 * NS_PER_S)
    metrics.token(R, 8 * NS_PER_S)
    metrics.token(R, 8 * NS_PER_S + 4 * NS_PER_MS)
    metrics.token(R, 9 * NS_PER_S)
    metrics.finished(R, FinishReason.LENGTH, 10 * NS_PER_S)
    sums = {
        "request_queue_time_seconds": 1,
        "request_prefill_time_seconds": 2,
        "time_to_first_token_seconds": 3,
        "inter_token_latency_seconds": 1,
        "request_time_per_output_token_seconds": 0.5,
        "e2e_request_latency_seconds": 5,
    }
    assert {name: of_model(metrics, f"{name}_sum") for name in sums} == sums
    assert of_model(metrics, "inter_token_latency_seconds_count") == 2
    assert of_model(metrics, "inter_token_latency_seconds_bucket", le="0.001") == 0
    assert of_model(metrics, "inter_token_latency_seconds_bucket", le="0.005") == 1
    assert of_model(metrics, "generation_tokens_total") == 3
    assert of_model(metrics, "prompt_tokens_total") == 7


def test_losing_a_turn_is_a_preemption_once() -> None:
    metrics = arrived(R)
    metrics.phase([R], running=True)
    metrics.phase([R, RequestId(99)], running=False)
    metrics.phase([R], running=False)
    assert of_model(metrics, "num_preemptions_total") == 1


def test_a_replayed_request_waits_again_and_is_not_a_new_one() -> None:
    metrics = arrived(R)
    metrics.started(R, 1)
    metrics.token(R, 2)
    metrics.replayed(R)
    assert queue(metrics) == (1, 0)
    metrics.started(R, 3)
    metrics.token(R, 4)
    metrics.finished(R, FinishReason.STOP, 5)
    assert of_model(metrics, "request_replays_total") == 1
    assert of_model(metrics, "request_queue_time_seconds_count") == 1
    assert of_model(metrics, "time_to_first_token_seconds_count") == 1


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.integers(0, 3000), st.booleans())
def test_attainment_is_the_share_of_tokens_on_time(gaps_ms: list[int], ttft_ms: int, fails: bool) -> None:
    metrics = arrived(R, max_tokens=30, now_ns=NS_PER_S)
    now_ms, met = 1000 + ttft_ms, 0
    for index, gap_ms in enumerate(gaps_ms):
        metrics.token(R, now_ms * NS_PER_MS)
        met += now_ms <= 1000 + 1000 + index * 100
        now_ms += gap_ms
    if fails:
        metrics.failed(R)
    due = 30 if fails else len(gaps_ms)
    assert of_model(metrics, "slo_attainment_ratio") == met / due
    assert of_model(metrics, "slo_tokens_total") == due


def test_a_cancelled_request_owes_nothing() -> None:
    metrics = arrived(R)
    metrics.token(R, 1)
    metrics.cancelled(R)
    assert of_model(metrics, "slo_attainment_ratio") == 1
    assert of_model(metrics, "slo_tokens_total") == 1


def test_tallies_are_what_the_series_say() -> None:
    metrics = arrived(R, R2)
    metrics.started(R, NS_PER_S // 2)
    metrics.token(R, NS_PER_S, 3)
    assert metrics.tallies() == [Tally(M, 1, 1, arrived=2, prompt_tokens=14, tokens=3, met=3, due=3)]
    metrics.finished(R, FinishReason.STOP, 2 * NS_PER_S)
    metrics.failed(R2)
    (told,) = metrics.tallies()
    assert (told.waiting, told.running, told.finished, told.failed, told.due) == (0, 0, 1, 1, 13)


def test_news_are_the_tallies_that_changed() -> None:
    metrics = arrived(R)
    assert metrics.changed_tallies() == metrics.tallies()
    assert metrics.changed_tallies() == []
    metrics.cancelled(R)
    assert metrics.changed_tallies() == [Tally(M, arrived=1, cancelled=1, prompt_tokens=7)]


def test_answers_are_counted_by_route_and_status() -> None:
    metrics = Metrics()
    for code in (200, 404, 404):
        metrics.answered("/v1/completions", code)
    assert value(metrics, "http_responses_total", path="/v1/completions", code="404") == 2


def test_refusals_are_counted_by_reason() -> None:
    metrics = Metrics()
    for refused in ("key_limit", "key_limit", "would_be_late", None):
        metrics.answered("/v1/completions", 429 if refused else 200, refused)
    assert value(metrics, "requests_refused_total", reason="key_limit") == 2
    assert value(metrics, "requests_refused_total", reason="would_be_late") == 1
