"""What is learned of how long changes of models take."""

from __future__ import annotations

import pytest

from decode.step_times import ChangeTimes

_MS = 1_000_000


def taught(changed_ms: list[int], usual_ms: int = 0) -> ChangeTimes:
    times = ChangeTimes()
    for lost_ms in changed_ms:
        times.saw(usual_ms * _MS, changed=False)
        times.saw(lost_ms * _MS, changed=True)
    return times


def test_what_changes_take_is_learned_after_some() -> None:
    assert taught([]).ns == 0
    assert taught([100] * 50).ns == pytest.approx(100 * _MS, rel=0.01)
    assert taught([100] * 50 + [20] * 50).ns == pytest.approx(20 * _MS, rel=0.02)


def test_what_comes_before_any_run_is_none_of_it() -> None:
    assert taught([100] * 50, usual_ms=40).ns == pytest.approx(60 * _MS, rel=0.01)
    assert taught([40] * 50, usual_ms=40).ns == 0


def test_what_makes_no_difference_to_turns_is_none() -> None:
    assert taught([4] * 50).ns == 0
