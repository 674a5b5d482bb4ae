"""The use of time by instances and links, and the duration of switches."""

import pytest

from aegis.telemetry.spans import SpanKind
from bench.report.run import Run
from bench.report.switching import cumulative, switches
from bench.report.usage import INWARDS, computing, link, rates, utilisation
from tests.unit.bench.report.made import MS, outcome, simulated, span


def test_time_is_used_for_one_thing_at_a_time() -> None:
    spans = [
        span("prefill", 0, 30, on="prefill-0"),
        span("switch", 20, 50, on="prefill-0"),
        span("decode", 0, 80),
        span("load", 0, 100),
    ]
    used = utilisation(Run("one", spans))
    assert list(used) == ["prefill-0", "decode-0"]
    assert used["prefill-0"] == pytest.approx({"prefill": 0.3, "decode": 0, "switch": 0.2})
    assert used["decode-0"] == pytest.approx({"prefill": 0, "decode": 0.8, "switch": 0})


def test_instances_are_in_order_of_their_numbers() -> None:
    spans = [span("decode", 0, 1, on=name) for name in ("decode-10", "decode-9", "prefill-2", "mixed-1")]
    assert list(utilisation(Run("one", spans))) == ["prefill-2", "decode-9", "decode-10", "mixed-1"]


def test_a_link_is_busy_while_anything_is_copied() -> None:
    spans = [span("load", 0, 20, nbytes=300), span("swap_in", 10, 30, nbytes=60), span("swap_out", 0, 90, nbytes=1)]
    inwards = link(spans, INWARDS, 100 * MS)
    assert inwards.busy == pytest.approx(0.3)
    assert inwards.nbytes == {SpanKind.LOAD: 300, SpanKind.PREFETCH: 0, SpanKind.SWAP_IN: 60}
    assert inwards.bytes_per_s == pytest.approx(360 / 0.03)


def test_curves_over_time_hold_all_there_is() -> None:
    run = simulated()
    width_s = (run.stop_ns - run.start_ns) / 1e9 / 100
    copied = sum(rate for _, rate in rates(run, INWARDS)) * width_s
    assert copied == pytest.approx(sum(each.nbytes for each in run.spans if each.kind in INWARDS), rel=1e-6)
    shares = [share for _, share in computing(run)]
    busy = sum(parts["prefill"] + parts["decode"] for parts in utilisation(run).values()) / 3
    assert sum(shares) / len(shares) == pytest.approx(busy, rel=1e-6)
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in shares)


def test_a_switch_is_prefetched_unless_a_load_begins_during_it() -> None:
    spans = [
        span("prefetch", 0, 8),
        span("switch", 5, 9),
        span("switch", 20, 30, model="b"),
        span("load", 21, 29, model="b"),
        span("load", 21, 29, model="c", on="decode-1"),
        span("switch", 22, 23, model="c"),
    ]
    told = switches(spans)
    assert (told.prefetched_ns, told.loaded_ns) == ((1 * MS, 4 * MS), (10 * MS,))


def test_switches_of_a_simulation_are_what_its_cores_said() -> None:
    told, said = switches(outcome().spans), outcome().switches
    assert len(told.prefetched_ns) == sum(done.prefetched for done in said) > 0
    assert len(told.loaded_ns) == sum(not done.prefetched for done in said) > 0


def test_a_cumulative_curve_ends_with_all() -> None:
    assert cumulative([1.0, 2.0, 4.0, 8.0]) == [(1.0, 0.25), (2.0, 0.5), (4.0, 0.75), (8.0, 1.0)]
    curve = cumulative([float(value) for value in range(5000)])
    assert len(curve) <= 201 and curve[-1] == (4999.0, 1.0)
    assert cumulative([]) == []
