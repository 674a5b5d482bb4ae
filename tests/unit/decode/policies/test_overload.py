"""Which batches are kept on time where not all can be, and for how long the others are put off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from aegis.core.ids import ModelId, RequestId
from aegis.core.views import BatchView, worth_of
from decode.policies.overload import shed_for_ns, shedding

_MS = 1_000_000
_S = 1_000 * _MS
QUANTUM_NS = _S
SHARE = 0.1
NOW_NS = 0


def batch(
    number: int,
    *,
    due_ms: int = 500,
    in_time_ms: int | None = 400,
    worth: float = 1.0,
    step_ms: int = 10,
    change_ms: int = 0,
    prefill_ms: int = 0,
    ran_ms: int = -1,
    late_ms: int = 0,
) -> BatchView:
    """Due every 100 ms, and with a first token within 10 s."""
    return BatchView(
        number,
        ModelId(f"m{number}"),
        step_ms * _MS,
        100 * _MS,
        0,
        change_ms * _MS,
        prefill_ns=prefill_ms * _MS,
        ran_ns=ran_ms * _MS if ran_ms >= 0 else -1,
        due_ns=due_ms * _MS,
        ttft_ns=10 * _S,
        resident=True,
        active=True,
        in_time_by_ns=None if in_time_ms is None else in_time_ms * _MS,
        worth=worth,
        late_ns=late_ms * _MS,
    )


def shed(*batches: BatchView) -> set[int]:
    return set(shedding(batches, QUANTUM_NS, SHARE, NOW_NS).shed)


def test_nobody_is_shed_while_there_is_time_for_all() -> None:
    assert shed(*(batch(number, step_ms=33, prefill_ms=5000) for number in range(3))) == set()
    assert len(shed(*(batch(number, step_ms=34) for number in range(3)))) == 1


def test_two_batches_at_a_time_have_more_than_all_of_the_time() -> None:
    for share, count in ((1.4, 0), (1.3, 1), (0.5, 2)):
        four = [structs.replace(batch(number, step_ms=34), steps_share=share) for number in range(4)]
        assert len(shed(*four)) == count, share


@pytest.mark.parametrize(
    "costly",
    [
        batch(1, step_ms=50),
        batch(1, worth=0.9, step_ms=44),
        batch(1, change_ms=200, step_ms=44),
        batch(1, prefill_ms=1000, step_ms=44),
        batch(1, late_ms=11_000, step_ms=44),
    ],
)
def test_who_makes_fewer_tokens_on_time_per_second_is_shed(costly: BatchView) -> None:
    """Steps, changes, prefills and catching up take time."""
    assert shed(costly, *(batch(number, step_ms=44) for number in (2, 3))) == {1}
    assert shed(batch(1, worth=2, step_ms=80), batch(2, step_ms=45)) == {2}


def test_who_is_late_needs_the_time_to_catch_up_within_four_ttfts() -> None:
    """A tenth of the time is left over where two of three have a third each. A quarter more is too much."""
    for late_ms, count in ((0, 1), (8_000, 1), (9_900, 2)):
        late = [batch(number, step_ms=33, late_ms=late_ms) for number in range(3)]
        assert len(shed(*late, batch(3, step_ms=10))) == count, late_ms


def test_what_turns_wait_for_is_a_part_of_what_each_batch_needs() -> None:
    for stall_ms, count in ((None, 1), (20, 1), (50, 2)):
        stall_ns = None if stall_ms is None else stall_ms * _MS
        four = [structs.replace(batch(number, step_ms=29), stall_ns=stall_ns) for number in range(4)]
        assert len(shed(*four)) == count, stall_ms


def test_none_is_kept_in_the_place_of_a_denser_one_but_the_densest_is_in_any_case() -> None:
    assert shed(batch(1, step_ms=60, worth=9), batch(2, step_ms=50, worth=2), batch(3, step_ms=30)) == {2, 3}
    assert shed(batch(1, step_ms=60, worth=9), batch(2, step_ms=50, worth=1), batch(3, step_ms=30)) == {2}
    assert shed(batch(1, step_ms=30, worth=9), batch(2, step_ms=91, worth=9), batch(3, step_ms=30)) == {2}
    assert shed(batch(1, step_ms=300), batch(2, step_ms=400)) == {2}, "no step is as short as its TBT"


def with_rows(
    number: int, share: float, *, in_time: int, rows: int = 10, step_ms: int = 25, priority: int = 0
) -> BatchView:
    """Of its requests so many are in time; steps of whole batches have had that share of the instance's time."""
    requests = tuple(RequestId(100 * number + row) for row in range(rows))
    view = batch(number, step_ms=step_ms, worth=in_time * worth_of(priority))
    return structs.replace(view, requests=requests, on_time=float(in_time), steps_share=share)


def test_where_steps_have_less_of_the_time_than_they_need_fewer_are_kept() -> None:
    """Three batches of four that want as much each fit into nine tenths of the time; if half of it is lost to what no
    estimate knows, one does. With three quarters of the time wanted that is also more than there is."""
    assert len(shed(*(with_rows(number, 1.0, in_time=2) for number in range(5)))) == 2
    assert len(shed(*(with_rows(number, 0.5, in_time=2) for number in range(5)))) == 4
    assert len(shed(*(with_rows(number, 0.5, in_time=2) for number in range(3)))) == 2


def test_what_is_lost_counts_no_more_than_four_times_what_is_late() -> None:
    """Who is on time all the same needs nobody else to be shed. Three batches want 0.75 of the time."""
    assert len(shed(*(with_rows(number, 0.5, in_time=100, rows=100) for number in range(5)))) == 2
    assert shed(*(with_rows(number, 0.5, in_time=100, rows=100) for number in range(3))) == set()
    assert shed(*(with_rows(number, 0.5, in_time=94, rows=100) for number in range(3))) == set()
    assert len(shed(*(with_rows(number, 0.5, in_time=93, rows=100) for number in range(3)))) == 1


@pytest.mark.parametrize("priority", [-3, 1, 3])
def test_what_is_on_time_is_not_late_for_being_worth_less_or_more(priority: int) -> None:
    assert shed(*(with_rows(number, 0.5, in_time=100, rows=100, priority=priority) for number in range(3))) == set()
    late = [with_rows(number, 0.5, in_time=50, rows=100) for number in (1, 2)]
    assert len(shed(with_rows(0, 0.5, in_time=100, rows=100, priority=priority), *late)) == 2


def test_who_is_kept_counts_by_the_first_token_that_can_be_on_time() -> None:
    """Unless nobody is shed: then there is time for the late ones, too."""
    late, beside = batch(2, due_ms=-500, in_time_ms=None), batch(3, due_ms=-500, in_time_ms=700)
    by_ns = shedding([batch(1), late, beside], QUANTUM_NS, SHARE, NOW_NS).by_ns
    assert by_ns == {1: 400 * _MS, 2: -510 * _MS, 3: -510 * _MS}
    by_ns = shedding([batch(1), late, beside, batch(4, step_ms=80)], QUANTUM_NS, SHARE, NOW_NS).by_ns
    assert (by_ns[1], by_ns[2], by_ns[3]) == (400 * _MS, -510 * _MS, 700 * _MS)


def test_of_batches_that_are_late_as_a_whole_the_last_to_have_had_a_turn_comes_last() -> None:
    late = [batch(number, due_ms=-5000, in_time_ms=None, ran_ms=1000 * number) for number in (1, 2)]
    by_ns = shedding(late, QUANTUM_NS, SHARE, NOW_NS).by_ns
    assert by_ns[1] < by_ns[2]


def test_who_is_shed_counts_by_its_last_turn_or_its_deadline() -> None:
    hot = batch(1, step_ms=80, worth=9)
    put_off_ns = shed_for_ns(2, QUANTUM_NS, SHARE)
    assert put_off_ns == 20 * _S, "so that turns of a quantum take a tenth of the time"
    late = [batch(2, step_ms=50, in_time_ms=None), batch(3, step_ms=50, ran_ms=7000, in_time_ms=None)]
    found = shedding([hot, *late], QUANTUM_NS, SHARE, NOW_NS)
    assert found.shed == {2, 3}
    assert (found.by_ns[2], found.by_ns[3]) == (450 * _MS + put_off_ns, 7 * _S + put_off_ns)


def test_time_that_the_kept_can_spare_goes_to_the_densest_that_can_be_on_time() -> None:
    """Who has waited longest comes when its time has come, and before that behind them."""
    hot = [batch(number, step_ms=40, worth=9, in_time_ms=5000) for number in (1, 2)]
    sparse, dense = batch(3, step_ms=50), batch(4, step_ms=50, worth=2)
    lost = batch(5, due_ms=-18_000, step_ms=50, in_time_ms=None, worth=0.1)
    found = shedding([*hot, sparse, dense, lost], QUANTUM_NS, SHARE, 10 * _S)
    assert found.shed == {3, 4, 5}
    assert (found.by_ns[4], found.by_ns[3]) == (12 * _S + 2, 12 * _S + 3), "a quantum of each of the two that are kept"
    early = batch(3, step_ms=50, due_ms=13_050)
    assert shedding([*hot, early], QUANTUM_NS, SHARE, 10 * _S).by_ns[3] == 12 * _S + 2, "although it could begin later"
    owed_ms = 12_500 - shed_for_ns(2, QUANTUM_NS, SHARE) // _MS
    owed = batch(4, step_ms=50, due_ms=owed_ms + 50, in_time_ms=None, worth=0.1)
    behind = shedding([*hot, early, owed], QUANTUM_NS, SHARE, 10 * _S)
    assert behind.by_ns[4] == 12_500 * _MS and behind.by_ns[3] > behind.by_ns[4], (
        "it may be put off no longer than that"
    )
    assert found.by_ns[5] == -18_050 * _MS + shed_for_ns(3, QUANTUM_NS, SHARE)


@given(
    drawn=st.lists(
        st.tuples(
            st.integers(-100_000, 20_000), st.floats(0, 64), st.integers(1, 300), st.integers(-1, 10_000), st.booleans()
        ),
        min_size=1,
        max_size=12,
    )
)
def test_nobody_counts_later_than_the_longest_time_after_its_turn_or_deadline(
    drawn: list[tuple[int, float, int, int, bool]],
) -> None:
    batches = [
        batch(at, due_ms=due, in_time_ms=due + 5000 if beside else None, worth=worth, step_ms=step, ran_ms=ran)
        for at, (due, worth, step, ran, beside) in enumerate(drawn)
    ]
    found = shedding(batches, QUANTUM_NS, SHARE, NOW_NS)
    assert set(found.by_ns) == set(range(len(batches)))
    for each in batches:
        assert each.due_ns is not None
        by_ns = each.due_ns - each.step_ns
        last_ns = each.ran_ns if each.ran_ns >= 0 else by_ns
        assert found.by_ns[each.batch] <= max(by_ns, last_ns + shed_for_ns(len(found.shed), QUANTUM_NS, SHARE))
