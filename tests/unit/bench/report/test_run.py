"""What a run is of: its time, and the decision that led to a span."""

from __future__ import annotations

import pytest

from bench.report.attainment import over_time
from bench.report.run import Reasons, Run
from bench.report.usage import utilisation
from tests.unit.bench.report.made import MS, record, simulated, span, turn


def test_the_last_decision_before_a_span_led_to_it() -> None:
    reasons = Reasons([turn(9, model="b"), turn(1), turn(4)])
    assert reasons.line(span("decode", 3, 4)) == turn(1).line
    assert reasons.line(span("decode", 4, 5)) == turn(4).line
    assert reasons.line(span("decode", 0.5, 2)) == "", "nothing was decided yet"
    assert reasons.line(span("decode", 10, 11)) == "", "another model had the turn"
    assert reasons.line(span("decode", 10, 11, model="b")) == turn(9, model="b").line
    assert reasons.line(span("decode", 3, 4, on="decode-1")) == ""


def test_a_switch_may_begin_before_what_it_is_for() -> None:
    reasons = Reasons([turn(1, model="b"), turn(5, kind="prefill")])
    assert reasons.line(span("switch", 2, 5)) == turn(5).line


def test_copies_and_places_have_none() -> None:
    assert Reasons([turn(1)]).line(span("load", 2, 3)) == ""
    assert Reasons([turn(1, kind="place")]).line(span("decode", 2, 3)) == ""


def test_whatever_a_simulation_computes_has_a_reason() -> None:
    run = simulated()
    computed = [each for each in run.spans if each.kind in ("prefill", "decode", "switch")]
    assert computed and all(each.model in run.reasons.line(each) for each in computed)


def test_records_of_another_clock_say_nothing_of_when_a_server_worked() -> None:
    """A client's begin at 0, a server's spans when its machine did."""
    spans = [span("decode", 1e6, 1e6 + 75), span("prefill", 1e6 + 90, 1e6 + 100)]
    run = Run("live", spans, [record(1, 0, 10, 20), record(2, 30, 40, 50)])
    assert (run.start_ns, run.stop_ns) == (spans[0].start_ns, spans[1].stop_ns)
    assert utilisation(run)["decode-0"]["decode"] == pytest.approx(0.75)
    assert [at_s for at_s, _ in over_time(run)] == pytest.approx([0.5 * 0.03 / 40, 39.5 * 0.03 / 40])


def test_records_of_the_same_clock_belong_to_a_runs_time() -> None:
    run = Run("one", [span("decode", 10, 20)], [record(1, 0, 12, 30)])
    assert (run.start_ns, run.stop_ns) == (0, 30 * MS)
    assert Run("alone", [], [record(1, 5, 12, 30)]).start_ns == 5 * MS
