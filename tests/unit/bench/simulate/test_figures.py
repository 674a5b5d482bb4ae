"""Figures of outcomes written by hand."""

from aegis.telemetry.spans import SpanKind
from bench.simulate.figures import figures
from tests.unit.bench.simulate.outcomes import outcome, record, span


def test_tokens_of_a_failed_request_are_missed() -> None:
    result = figures(outcome(records=[record(1, token_ms=(10, 20, 30)), record(2, token_ms=(10,), asked=5)]))
    assert (result.requests, result.failed, result.tokens) == (2, 1, 8)
    assert result.attainment == 4 / 8
    assert result.goodput_tokens_per_s == 4.0


def test_times_to_first_tokens_and_between_tokens() -> None:
    records = [record(1, at_ms=5, token_ms=(15, 25, 125)), record(2, token_ms=(30,)), record(3, asked=4)]
    result = figures(outcome(records=records))
    assert (result.ttft_p50_ms, result.ttft_p99_ms) == (10.0, 30.0)
    assert result.tbt_p99_ms == 100.0


def test_utilisation_is_of_all_instances_and_of_computing_alone() -> None:
    spans = [span(SpanKind.PREFILL, 0, 100), span(SpanKind.DECODE, 100, 400), span(SpanKind.LOAD, 400, 900)]
    assert figures(outcome(spans=spans, instances=2)).utilisation == 0.2


def test_nothing_asked_for_is_nothing_missed() -> None:
    result = figures(outcome())
    assert (result.attainment, result.ttft_p50_ms, result.tbt_p99_ms) == (1.0, None, None)
