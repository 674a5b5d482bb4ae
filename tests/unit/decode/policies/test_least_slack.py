"""Least slack: who has the turn, for how long, and where requests go."""

from __future__ import annotations

from dataclasses import replace

from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.views import BatchView, Renewal, TurnRules, Work
from decode.policies.least_slack import LeastSlack
from proxy.decode_lists import DecodeLists

_MS = 1_000_000
_S = 1_000 * _MS
POLICY = LeastSlack(migrate_bytes=50, turn_factor=0.5)
A, B, C = (ModelId(name) for name in "abc")
X, Y = InstanceId("x"), InstanceId("y")


def batch(
    number: int,
    due_ms: int | None = None,
    *,
    first_due_ms: int | None = None,
    prefill_ms: int = 0,
    step_ms: int = 10,
    switch_ms: int = 1600,
    resident: bool = True,
    turn_ms: int | None = None,
    savable_ms: int | None = None,
) -> BatchView:
    """Of a model of its own, due every 100 ms."""
    return BatchView(
        number,
        ModelId(f"m{number}"),
        step_ms * _MS,
        100 * _MS,
        switch_ms * _MS,
        waiting=int(first_due_ms is not None),
        prefill_ns=prefill_ms * _MS,
        first_due_ns=None if first_due_ms is None else first_due_ms * _MS,
        due_ns=None if due_ms is None else due_ms * _MS,
        savable_due_ns=None if savable_ms is None else savable_ms * _MS,
        ttft_ns=10 * _S,
        resident=resident,
        turn_ns=None if turn_ms is None else turn_ms * _MS,
    )


def order(*batches: BatchView) -> list[int]:
    return [turn.batch for turn in POLICY.plan(batches, 0)]


def test_who_has_to_begin_first_comes_first() -> None:
    assert order(batch(1, 900), batch(2, 300), batch(3, 600)) == [2, 3, 1]
    assert order(batch(1, 900), batch(2, 900, step_ms=20)) == [2, 1], "a longer step begins earlier"
    assert order(batch(1, 900), batch(2, 2100, resident=False)) == [2, 1], "and who has to be brought in first"
    assert order(batch(1, 900), batch(2, 3000, first_due_ms=1100, prefill_ms=300)) == [2, 1], "and who is prefilled"
    assert order(batch(2, 900), batch(1, 900)) == [1, 2]


def test_the_running_batch_keeps_its_turn_for_a_quantum() -> None:
    """Half of √(1.6 s · 10 s)."""
    busy = [batch(number, 100, step_ms=30) for number in (1, 2)]
    assert order(*busy, batch(3, 5000, turn_ms=1999)) == [3, 1, 2]
    assert order(*busy, batch(3, 5000, turn_ms=2000)) == [1, 2, 3]
    assert [turn.quota_ns for turn in POLICY.plan(busy, 0)] == [2 * _S, 2 * _S]


def test_prefills_are_not_taken_from_the_quantum() -> None:
    (turn,) = POLICY.plan([batch(1, first_due_ms=100, prefill_ms=700, step_ms=70)], 0)
    assert turn.quota_ns == 2700 * _MS


def test_prefills_may_last_until_somebody_there_needs_a_step_to_be_on_time() -> None:
    cutting = replace(POLICY, rules=TurnRules(renewal=Renewal.ARRIVAL, chunk_tokens=512))
    late, away, first = batch(1, -500), batch(2, 100, savable_ms=100, resident=False), batch(3, first_due_ms=60)
    batches = [batch(4, -500, savable_ms=300, step_ms=20), late, away, first, batch(5, 400, savable_ms=400)]
    assert {turn.free_until_ns for turn in cutting.plan(batches, 0)} == {280 * _MS}
    assert {turn.free_until_ns for turn in cutting.plan([late, away, first], 0)} == {None}
    assert {turn.free_until_ns for turn in POLICY.plan(batches, 0)} == {None}, "it cuts none"


def test_who_has_time_to_spare_changes_sooner() -> None:
    """No longer than switching is worth."""
    (there,) = POLICY.plan([batch(1, 100)], 0)
    assert there.quota_ns == 30 * _MS
    turns = POLICY.plan([batch(1, 100), batch(2, 100, switch_ms=200, resident=False)], 0)
    assert [turn.quota_ns for turn in turns] == [830 * _MS] * 2


def lists() -> DecodeLists:
    made = DecodeLists({A: 1000, B: 1000, C: 1000}, {A: 40, B: 20, C: 10}, {A: 1, B: 1, C: 1})
    made.up(X)
    made.up(Y)
    return made


def test_models_are_spread() -> None:
    made = lists()
    for request, model in enumerate((A, B, C)):
        work = Work(model, 1)
        made.add(POLICY.place(work, made), RequestId(request), work)
    assert [made.last_home(model) for model in (A, B, C)] == [X, Y, Y]


def test_nothing_in_flight_models_go_where_less_was_ever_housed() -> None:
    made = lists()
    made.add(X, RequestId(1), Work(A, 1))
    made.remove(X, RequestId(1))
    assert POLICY.place(Work(B, 1), made) == Y


def test_requests_follow_their_model_until_elsewhere_it_is_much_better() -> None:
    made = lists()
    made.add(X, RequestId(1), Work(B, 30))
    assert POLICY.place(Work(B, 1), made) == X
    made.add(X, RequestId(2), Work(B, 1))
    assert POLICY.place(Work(B, 1), made) == Y
    made.add(Y, RequestId(3), Work(B, 1))
    assert POLICY.place(Work(B, 1), made) == Y, "the last one of its model went there"


def test_a_model_with_no_requests_left_goes_where_the_pressure_is_least() -> None:
    made = lists()
    made.add(X, RequestId(1), Work(A, 1))
    made.remove(X, RequestId(1))
    assert POLICY.place(Work(A, 1), made) == X, "its weights may be there still"
    made.add(X, RequestId(2), Work(C, 1))
    assert POLICY.place(Work(A, 1), made) == Y


def test_a_model_whose_batch_is_full_is_served_elsewhere_too() -> None:
    policy, made = replace(POLICY, migrate_bytes=10**6), lists()
    made.add(X, RequestId(1), Work(B, 990))
    assert policy.place(Work(B, 10), made) == X
    assert policy.place(Work(B, 11), made) == Y
    made.add(Y, RequestId(2), Work(B, 11))
    assert policy.place(Work(B, 10), made) == Y, "and stays there while that has room"
    made.add(Y, RequestId(3), Work(B, 985))
    assert policy.place(Work(B, 10), made) == X, "with room nowhere the pressure decides"
