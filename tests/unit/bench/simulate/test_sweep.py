"""Sweeps, and where curves fall below 90 %."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.errors import UserError
from bench.simulate.sweep import GOAL, Crossing, crossing, parse


def test_steps_are_exact_and_reach_the_end() -> None:
    assert parse("models=16:80:32").values == ("16", "48", "80")
    assert parse("models=16:79:32").values == ("16", "48")
    rates = parse("rps=0.05:0.7:0.05")
    assert (rates.key, len(rates.values), rates.values[:3], rates.values[-1]) == (
        "rps",
        14,
        ("0.05", "0.10", "0.15"),
        "0.70",
    )


@pytest.mark.parametrize(
    "text",
    ["models", "models=16", "=1:2:1", "models=16:80", "models=80:16:8", "models=1:2:0", "models=1:x:1", "r=-1:1:1"],
)
def test_what_is_no_sweep_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="KEY=LOW:HIGH:STEP"):
        parse(text)


@pytest.mark.parametrize("steps", ["nan:1:1", "0:inf:1", "0:1:nan", "0:1:1e-9"])
def test_neither_are_steps_without_an_end(steps: str) -> None:
    with pytest.raises(UserError, match="KEY=LOW:HIGH:STEP"):
        parse(f"rps={steps}")


def test_a_crossing_lies_on_the_line_between_two_points() -> None:
    assert crossing([16, 24, 32], [1.0, 0.95, 0.85]) == Crossing(at=28.0)
    assert crossing([16, 24, 32], [1.0, 0.85, 0.95]).at == pytest.approx(16 + 8 * 2 / 3, abs=1e-3)  # the first fall
    assert crossing([16, 24], [0.9, 0.9]) == Crossing(above=24)
    assert crossing([16, 24], [0.89, 1.0]) == Crossing(below=16)


def test_crossings_are_told_in_a_word() -> None:
    assert [str(c) for c in (Crossing(at=74.04), Crossing(above=80), Crossing(below=16))] == ["74", "> 80", "< 16"]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_before_its_crossing_a_curve_is_not_below(attainments: list[float]) -> None:
    values = [float(8 * i) for i in range(len(attainments))]
    found = crossing(values, attainments)
    if found.at is not None:
        assert all(share >= GOAL for value, share in zip(values, attainments, strict=True) if value < found.at - 1e-3)
        assert any(share < GOAL for value, share in zip(values, attainments, strict=True) if value >= found.at - 1e-3)
    else:
        assert (attainments[0] < GOAL) == (found.below is not None)
        assert (min(attainments) >= GOAL) == (found.above is not None)
