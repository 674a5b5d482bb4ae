"""A machine's speed, window by window."""

from __future__ import annotations

from aegis.core.clock import NS_PER_S
from aegis.sim.costs import Drift
from aegis.telemetry.spans import SpanKind
from bench.calibration.speed import Speed
from bench.yardstick import Reading

WINDOW_NS = 10 * NS_PER_S


def readings(window: int, step_ns: int, prompt_ns: int) -> list[Reading]:
    """One that was disturbed among them."""
    at_ns = [window * WINDOW_NS + second * NS_PER_S for second in range(10)]
    return [Reading(at_ns[0], 50 * step_ns, prompt_ns), *(Reading(at, step_ns, prompt_ns) for at in at_ns[1:])]


SPEED = Speed([*readings(5, 100, 1_000), *readings(6, 100, 1_000), *readings(8, 150, 900)])


def test_slowness_is_beside_the_usual_of_all_and_of_the_same_kind() -> None:
    at_ns = 8 * WINDOW_NS + 1
    assert SPEED.slowness(SpanKind.DECODE, at_ns) == 1.5
    assert SPEED.slowness(SpanKind.PREFILL, at_ns) == 0.9
    assert SPEED.slowness(SpanKind.DECODE, 6 * WINDOW_NS) == 1.0


def test_a_time_without_readings_is_like_the_one_before() -> None:
    assert SPEED.slowness(SpanKind.DECODE, 7 * WINDOW_NS + 5) == 1.0
    assert SPEED.slowness(SpanKind.DECODE, 0) == 1.0
    assert SPEED.slowness(SpanKind.DECODE, 99 * WINDOW_NS) == 1.5


def test_a_simulation_is_told_of_the_window_in_which_it_begins_and_of_later_ones() -> None:
    assert list(SPEED.drifts(6 * WINDOW_NS + NS_PER_S)) == [
        Drift(0, 1_000, 1_000),
        Drift(9 * NS_PER_S, 1_000, 1_000),
        Drift(19 * NS_PER_S, 1_500, 900),
    ]
