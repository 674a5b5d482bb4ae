"""Laws of the contention guard."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.contention_guard import WHOLE, Beside, ContentionGuard, Decoding

SHARES = st.integers(100, WHOLE)
DECODINGS = st.builds(Decoding, rows=st.integers(1, 256), context=st.integers(0, 2_000_000))
BESIDE = st.one_of(st.none(), st.builds(Beside, new=st.integers(1, 200_000), reused=st.integers(0, 200_000)))
SEEN = st.lists(st.tuples(SHARES, st.floats(1.0, 20.0)), max_size=8)
ERROR = 1.0884
DECODING, PREFILL = Decoding(rows=8, context=10_000), Beside(new=4_000, reused=1_000)


@given(decoding=DECODINGS, beside=BESIDE, share=SHARES)
def test_what_nobody_has_seen_is_as_slow_as_it_can_be(decoding: Decoding, beside: Beside | None, share: int) -> None:
    """In proportion to the share, and a worst case of contention besides."""
    contention = 1.3 if beside else 1.0
    assert ContentionGuard().factor(decoding, beside, share) == pytest.approx(contention * WHOLE / share)


@given(decoding=DECODINGS, beside=BESIDE, seen=SEEN)
def test_it_is_never_below_what_was_seen(
    decoding: Decoding, beside: Beside | None, seen: list[tuple[int, float]]
) -> None:
    guard = ContentionGuard()
    for share, factor in seen:
        guard.saw(decoding, beside, share, factor)
    assert all(guard.factor(decoding, beside, share) >= factor for share, factor in seen)


@given(decoding=DECODINGS, beside=BESIDE, seen=SEEN, shares=st.tuples(SHARES, SHARES))
def test_a_smaller_share_is_never_faster(
    decoding: Decoding, beside: Beside | None, seen: list[tuple[int, float]], shares: tuple[int, int]
) -> None:
    guard = ContentionGuard()
    for share, factor in seen:
        guard.saw(decoding, beside, share, factor)
    smaller, larger = sorted(shares)
    assert guard.factor(decoding, beside, smaller) >= guard.factor(decoding, beside, larger)


def test_rounding_makes_no_smaller_share_faster() -> None:
    guard = ContentionGuard()
    for factor in (1 + step / 97 for step in range(97)):
        guard.saw(DECODING, PREFILL, 100, factor)
        factors = [guard.factor(DECODING, PREFILL, share) for share in range(100, 1001)]
        assert factors == sorted(factors, reverse=True)


def test_it_learns_towards_smaller_shares() -> None:
    """A step on 3/4 that took hardly longer says that one on the half takes at most 3/2 of it."""
    guard = ContentionGuard()
    guard.saw(DECODING, PREFILL, 750, 1.1)
    assert guard.factor(DECODING, PREFILL, 750) == pytest.approx(1.1 * ERROR)
    assert guard.factor(DECODING, PREFILL, 500) == pytest.approx(1.65 * ERROR)
    guard.saw(DECODING, PREFILL, 500, 1.3)
    assert guard.factor(DECODING, PREFILL, 500) == pytest.approx(1.3 * ERROR)
    assert guard.factor(DECODING, PREFILL, 600) == pytest.approx(1.3 * ERROR)


def test_the_slowest_of_a_cell_counts() -> None:
    guard = ContentionGuard()
    guard.saw(DECODING, PREFILL, 500, 1.9)
    guard.saw(DECODING, PREFILL, 500, 1.2)
    assert guard.factor(DECODING, PREFILL, 500) == pytest.approx(1.9 * ERROR)


@pytest.mark.parametrize(
    ("decoding", "beside"),
    [
        (Decoding(rows=64, context=10_000), PREFILL),
        (Decoding(rows=8, context=300_000), PREFILL),
        (DECODING, Beside(new=40_000, reused=1_000)),
        (DECODING, Beside(new=4_000, reused=40_000)),
        (DECODING, None),
    ],
)
def test_another_cell_learns_nothing_from_it(decoding: Decoding, beside: Beside | None) -> None:
    guard, untaught = ContentionGuard(), ContentionGuard()
    guard.saw(DECODING, PREFILL, 500, 1.1)
    assert guard.factor(decoding, beside, 500) == untaught.factor(decoding, beside, 500)
