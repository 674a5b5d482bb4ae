"""The faults follow from the seed, kind by kind."""

from __future__ import annotations

import pytest

from aegis.core.errors import UserError
from aegis.sim.faults.plan import EVERY, Kind, draw_plan, kinds_of

SPAN_NS = 100_000_000


def test_of_all_kinds_some_happen_and_each_now_and_then() -> None:
    plans = [draw_plan(seed, EVERY, SPAN_NS) for seed in range(50)]
    assert all(plan.kinds for plan in plans) and {kind for plan in plans for kind in plan.kinds} == EVERY
    assert len({str(plan) for plan in plans}) > 40


def test_what_is_named_happens_and_as_it_would_among_others() -> None:
    for seed in range(20):
        some, every = draw_plan(seed, frozenset({Kind.CRASH, Kind.SLOW}), SPAN_NS), draw_plan(seed, EVERY, SPAN_NS)
        assert some.kinds == {Kind.CRASH, Kind.SLOW} and some.crashes and some.slow
        assert not (some.pauses or some.delays or some.neighbours or some.parted or some.failing_share)
        assert some.crashes == every.crashes or Kind.CRASH not in every.kinds
        assert all(0 <= crash.at_ns < SPAN_NS for crash in some.crashes)


def test_kinds_are_named() -> None:
    assert kinds_of(["crash", "slow"]) == {Kind.CRASH, Kind.SLOW}
    with pytest.raises(UserError, match="there is no 'fire'"):
        kinds_of(["fire"])
