"""Weighted round-robin (Aegaeon Algorithm 2, eq. 2 and 3)."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.views import BatchView, Turn, Work
from decode.policies.weighted_round_robin import WeightedRoundRobin, quotas_ns
from proxy.routing.decode_lists import DecodeLists

A, B, C, OTHER = ModelId("a"), ModelId("b"), ModelId("c"), ModelId("other")
Q_MAX = 4 * NS_PER_S


def batch(
    number: int, model: ModelId, *, step_ms: float = 25, tbt_ms: float = 100, switch_ms: float = 1000
) -> BatchView:
    return BatchView(number, model, round(step_ms * 1e6), round(tbt_ms * 1e6), round(switch_ms * 1e6))


def attainment(batches: list[BatchView], quotas: list[int]) -> list[float]:
    """Tokens made in a round, times the interval they are due in, over the round's length with all its switches."""
    switches = {b.model: b.switch_ns for b in batches}
    round_ns = sum(quotas) + sum(switches.values())
    return [q / b.step_ns * b.tbt_ns / round_ns for b, q in zip(batches, quotas, strict=True)]


def test_the_papers_example() -> None:
    """§4.3: three batches, d = 0.1, t = 0.025, c = 3, Q_MAX = 3: turns of 3 s in a round of 12 s, nothing is late."""
    batches = [batch(i, model) for i, model in enumerate((A, B, C))]
    quotas = quotas_ns(batches, 3 * NS_PER_S)
    assert quotas == [3 * NS_PER_S] * 3
    assert sum(quotas) + 3 * NS_PER_S == 12 * NS_PER_S
    assert attainment(batches, quotas) == pytest.approx([1, 1, 1])


def test_alpha_is_never_below_a_half() -> None:
    """With deadlines met twice over, quotas shrink so that new batches wait less: 1/α is 200 %."""
    batches = [batch(1, A, switch_ms=10), batch(2, B, switch_ms=10)]
    quotas = quotas_ns([batch(1, A, step_ms=10, switch_ms=10), batch(2, B, step_ms=10, switch_ms=10)], Q_MAX)
    assert quotas == [round(20e6 / (10 * (0.5 - 0.2)))] * 2
    loose = [batch(1, A, step_ms=10, switch_ms=10), batch(2, B, step_ms=10, switch_ms=10)]
    assert attainment(loose, quotas) == pytest.approx([2, 2])
    assert quotas_ns(batches, Q_MAX) == [Q_MAX, Q_MAX], "Σ 1/n = 0.5 already: the first term decides"


def test_a_slow_batch_gets_a_longer_turn() -> None:
    """q is as 1/n: all make the same progress against their deadlines."""
    batches = [batch(1, A, step_ms=20), batch(2, B, step_ms=60), batch(3, C, step_ms=60, tbt_ms=300)]
    quotas = quotas_ns(batches, Q_MAX)
    assert quotas[1] == Q_MAX and quotas[0] == pytest.approx(Q_MAX / 3) == quotas[2]
    assert len({round(x, 6) for x in attainment(batches, quotas)}) == 1


def test_tokens_may_all_be_due_at_once() -> None:
    quotas = quotas_ns([batch(1, A, tbt_ms=0), batch(2, B, tbt_ms=0)], Q_MAX)
    assert all(0 < quota <= Q_MAX for quota in quotas)


def test_with_one_model_there_is_nothing_to_switch() -> None:
    assert quotas_ns([batch(1, A)], Q_MAX) == [Q_MAX]
    assert quotas_ns([batch(1, A), batch(2, A)], Q_MAX) == [Q_MAX, Q_MAX]


def test_two_batches_of_a_model_are_switched_to_once() -> None:
    """c is a sum over models, not over batches."""
    three = [batch(1, A, step_ms=10, switch_ms=30), batch(2, A, step_ms=10, switch_ms=30), batch(3, B, step_ms=10)]
    c, share = 1030e6, 0.3
    assert quotas_ns(three, Q_MAX) == [round(c / (10 * (0.5 - share)))] * 3


views = st.lists(
    st.tuples(st.sampled_from([A, B, C]), st.floats(1, 300), st.sampled_from([20, 100, 500])), min_size=1, max_size=8
).map(lambda xs: [batch(i, m, step_ms=step, tbt_ms=tbt, switch_ms=200) for i, (m, step, tbt) in enumerate(xs)])


@given(views, st.integers(100 * NS_PER_MS, 10 * NS_PER_S))
def test_equations_2_and_3(batches: list[BatchView], q_max_ns: int) -> None:
    """No quota is above Q_MAX, and every batch of a round reaches the attainment min(2, 1/α) that eq. 3 promises."""
    quotas = quotas_ns(batches, q_max_ns)
    assert all(0 < q <= q_max_ns + 1 for q in quotas)
    if len({b.model for b in batches}) == 1:
        assert quotas == [q_max_ns] * len(batches)
        return
    n = [b.tbt_ns / b.step_ns for b in batches]
    c = sum({b.model: b.switch_ns for b in batches}.values())
    alpha = max(c / (min(n) * q_max_ns) + sum(1 / x for x in n), 0.5)
    assert attainment(batches, quotas) == pytest.approx([1 / alpha] * len(batches), rel=1e-3)


@given(views)
def test_batches_of_one_model_are_adjacent_and_none_is_left_out(batches: list[BatchView]) -> None:
    turns = WeightedRoundRobin().plan(batches, 0)
    model = {b.batch: b.model for b in batches}
    order = [model[turn.batch] for turn in turns]
    changes = sum(a != b for a, b in pairwise(order))
    assert sorted(turn.batch for turn in turns) == [b.batch for b in batches]
    assert changes == len(set(order)) - 1
    assert list(dict.fromkeys(order)) == list(dict.fromkeys(b.model for b in batches)), "in order of first batches"


def test_a_plan_gives_each_batch_its_own_quota() -> None:
    batches = [batch(1, A, step_ms=20), batch(2, B, step_ms=60), batch(3, A, step_ms=60)]
    plan = WeightedRoundRobin(Q_MAX).plan(batches, 0)
    assert [turn.batch for turn in plan] == [1, 3, 2]
    assert plan[1:] == [Turn(3, Q_MAX), Turn(2, Q_MAX)] and plan[0].quota_ns == pytest.approx(Q_MAX / 3)


def test_cheap_switches_do_not_make_others_wait_for_long() -> None:
    """Turns of 4 s would spare two switches of 2 ms: the round ends as soon as switching takes a twentieth of it."""
    cheap = [batch(i, m, step_ms=50, switch_ms=2) for i, m in enumerate((A, B))]
    plan = WeightedRoundRobin(Q_MAX).plan(cheap, 0)
    assert [turn.quota_ns for turn in plan] == pytest.approx([38 * NS_PER_MS] * 2, rel=1e-3)
    assert [turn.quota_ns for turn in WeightedRoundRobin(Q_MAX, 0).plan(cheap, 0)] == [Q_MAX] * 2
    dear = [batch(i, m, step_ms=50) for i, m in enumerate((A, B))]
    assert [turn.quota_ns for turn in WeightedRoundRobin(Q_MAX).plan(dear, 0)] == [Q_MAX] * 2, "as in the paper"


def lists(*held: tuple[str, int, set[ModelId]]) -> DecodeLists:
    """Names, numbers of full batches of another model, and models that have a batch with room besides."""
    made, request = DecodeLists({A: 10, B: 10, C: 10, OTHER: 1}), itertools.count()
    for name, full, models in held:
        made.up(InstanceId(name))
        for model in [OTHER] * full + sorted(models):
            made.add(InstanceId(name), RequestId(next(request)), Work(model, 1))
    return made


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([("a", 0, set()), ("b", 3, {A})], "b"),
        ([("a", 5, {A}), ("b", 3, {A})], "a"),
        ([("a", 2, {B}), ("b", 1, {C})], "b"),
        ([("a", 1, set()), ("b", 1, set())], "a"),
    ],
    ids=["a batch with room before load", "the first with room", "the shortest list", "ties by id"],
)
def test_place(held: list[tuple[str, int, set[ModelId]]], expected: str) -> None:
    assert WeightedRoundRobin().place(Work(A, 9), lists(*held)) == expected


def test_a_batch_with_too_little_room_is_not_joined() -> None:
    assert WeightedRoundRobin().place(Work(A, 10), lists(("a", 0, {A}), ("b", 0, set()))) == "b"
