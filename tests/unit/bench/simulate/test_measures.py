"""Breakdown, switches and fragmentation of outcomes written by hand."""

import pytest

from aegis.core.model import Slo
from aegis.sim.sampling import HostUse
from aegis.sim.shapes import SHAPES
from aegis.telemetry.spans import SpanKind
from bench.simulate.breakdown import STAGES, breakdown
from bench.simulate.fragmentation import fragmentation
from bench.simulate.switching import switching
from tests.unit.bench.simulate.outcomes import MS, outcome, record, span, switch


def test_the_stages_of_requests_add_up_to_their_time() -> None:
    """Two requests of 100 ms each: 10 ms of waiting and 20 of prefill, then a run of both."""
    spans = [span(SpanKind.PREFILL, 12, 32, requests=1)] * 2
    spans += [span(SpanKind.DECODE, 50, 90, requests=2), span(SpanKind.SWAP_IN, 40, 45)]
    records = [record(1, token_ms=(34, 100)), record(2, token_ms=(34, 100))]
    result = breakdown(outcome(records=records, spans=spans), 2 * MS)
    assert sum(getattr(result, stage) for stage in STAGES) == pytest.approx(1)
    assert (result.prefill_wait, result.prefill, result.decode) == (0.1, 0.2, 0.4)
    assert (result.kv_copies, result.messages) == (0.025, 0.06)
    assert result.mean_s == 0.1


def test_switches_are_counted_by_shape_and_whole() -> None:
    switches = [switch("m000", 0, prefetched=True), switch("m000", 300), switch("m001", 500)]
    spans = [span(SpanKind.SWAP_OUT, 0, 4), span(SpanKind.LOAD, 0, 300)]
    result = switching(outcome(switches=switches, spans=spans), {"m000": "small", "m001": "large"}, 2 * MS)
    assert [(name, each.count) for name, each in result.switches.items()] == [("large", 1), ("small", 2)]
    small = result.switches["small"].cdf_ms
    assert (small[0], small[49], small[50], small[99]) == (2.0, 2.0, 302.0, 302.0)
    assert result.prefetched == pytest.approx(1 / 3, abs=1e-6)
    assert set(result.kv_copies.cdf_ms) == {4.0}


def test_waste_is_the_mean_over_time_of_what_is_held_and_not_taken() -> None:
    seven, thirteen = (SHAPES[name].spec("m", Slo()).manifest.kv for name in ("qwen2.5-7b", "llama-2-13b"))
    samples = [HostUse(0, seven, 100, 50), HostUse(0, thirteen, 100, 100), HostUse(1, seven, 400, 400)]
    result = fragmentation(samples, {seven: "7b", thirteen: "13b"}).shapes
    assert sorted(result) == ["13b", "7b", "all"]
    assert (result["7b"].of_held, result["7b"].of_peak, result["7b"].peak_bytes) == (0.1, 50 / 800, 400)
    assert result["all"].of_held == pytest.approx(50 / 600, abs=1e-6)
    assert result["13b"].of_held == 0
