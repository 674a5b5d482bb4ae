"""Laws of shares of compute and of bandwidth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.sim.compute_shares import WHOLE, ComputeShares, SharedBandwidth

A100 = ComputeShares(units=108, step_units=16, prefill_traffic=0.2)
H100 = ComputeShares(units=132, step_units=16, prefill_traffic=0.3)
SHARES = st.integers(1, WHOLE)


def test_there_are_as_many_divisions_as_in_the_paper() -> None:
    """MuxWise §3.3.2: steps of 16 multiprocessors, six divisions of an A100 and seven of an H100."""
    assert A100.divisions()[0] == (148, 852) and len(A100.divisions()) == 6
    assert H100.divisions()[0] == (121, 879) and len(H100.divisions()) == 7
    assert ComputeShares(units=2, step_units=1, prefill_traffic=0).divisions() == ((500, 500),)
    assert ComputeShares(units=1, step_units=1, prefill_traffic=0).divisions() == ()
    assert all(sum(division) == WHOLE for division in A100.divisions() + H100.divisions())


def test_the_whole_device_is_worth_what_it_is_without_lanes() -> None:
    assert A100.decode_slowness(WHOLE) == A100.prefill_slowness(WHOLE) == WHOLE


@given(smaller=SHARES, larger=SHARES)
def test_a_larger_share_is_never_slower(smaller: int, larger: int) -> None:
    smaller, larger = sorted((smaller, larger))
    assert A100.decode_slowness(smaller) >= A100.decode_slowness(larger) >= WHOLE
    assert A100.prefill_slowness(smaller) >= A100.prefill_slowness(larger) >= WHOLE


@given(share=SHARES)
def test_decode_loses_less_than_prefill_and_neither_more_than_its_share(share: int) -> None:
    assert A100.decode_slowness(share) <= A100.prefill_slowness(share) <= WHOLE * WHOLE / share + 1


@pytest.mark.parametrize(("shares", "worst"), [(A100, 0.2), (H100, 0.3)])
def test_a_decode_beside_a_prefill_is_slowed_as_in_figure_11(shares: ComputeShares, worst: float) -> None:
    """From nearly nothing to 20 % on A100 and 30 % on H100, whatever the division and the batch."""
    slowdowns = []
    for first, second in shares.divisions():
        for memory in (0.3, 0.6, 1.0):
            bandwidth = SharedBandwidth()
            bandwidth.enter(lambda slowness: None, shares.decode_traffic(first, memory))
            bandwidth.enter(lambda slowness: None, shares.prefill_traffic_of(second))
            slowdowns.append(bandwidth.slowness / WHOLE - 1)
    assert min(slowdowns) == 0 and 0 < max(slowdowns) <= worst


def test_two_decodes_that_read_all_the_time_gain_nothing_side_by_side() -> None:
    bandwidth = SharedBandwidth()
    half = A100.decode_traffic(500, 1.0)
    bandwidth.enter(lambda slowness: None, half)
    assert bandwidth.slowness == WHOLE
    bandwidth.enter(print, half)
    alone_slowness = A100.decode_slowness(500) * bandwidth.slowness / WHOLE
    assert alone_slowness == pytest.approx(2 * WHOLE, rel=0.01)


def test_runs_are_told_when_the_bandwidth_gets_short_and_when_it_is_enough_again() -> None:
    bandwidth, told = SharedBandwidth(), list[tuple[str, int]]()
    a, b, c = [(lambda slowness, name=name: told.append((name, slowness))) for name in "abc"]
    bandwidth.enter(a, 700)
    bandwidth.enter(b, 200)
    assert (bandwidth.slowness, told) == (WHOLE, [])
    bandwidth.enter(c, 600)
    assert told == [("a", 1_500), ("b", 1_500)]
    bandwidth.leave(b)
    assert told[2:] == [("a", 1_300), ("c", 1_300)]
    bandwidth.leave(c)
    assert told[4:] == [("a", WHOLE)]


def test_a_run_takes_no_more_bandwidth_than_there_is() -> None:
    bandwidth = SharedBandwidth()
    bandwidth.enter(print, 5_000)
    assert bandwidth.slowness == WHOLE
