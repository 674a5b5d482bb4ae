"""The decision that led to a span."""

from __future__ import annotations

from bench.report.run import Reasons
from tests.unit.bench.report.made import simulated, span, turn


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
