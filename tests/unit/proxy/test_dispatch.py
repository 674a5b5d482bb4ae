"""The proxy's mirrors of the instances' queues."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.views import MAX_BATCH, GroupView
from proxy.dispatch import DecodeMirror, PrefillMirror

A, B = ModelId("a"), ModelId("b")
I = InstanceId("i")  # noqa: E741


def test_a_groups_size_is_cumulative() -> None:
    """Running a job does not make room for another one (Aegaeon §4.2)."""
    mirror = PrefillMirror(I)
    group = mirror.add(RequestId(1), A, 10, None)
    assert mirror.add(RequestId(2), A, 20, group) == group
    mirror.remove(RequestId(1))
    mirror.add(RequestId(3), A, 30, group)
    assert mirror.view().groups == (GroupView(group, A, 3, (20, 30)),)


def test_a_group_with_nobody_left_is_gone_and_its_number_is_not_used_again() -> None:
    mirror = PrefillMirror(I)
    first = mirror.add(RequestId(1), A, 10, None)
    mirror.remove(RequestId(1))
    assert mirror.view().groups == ()
    assert mirror.add(RequestId(2), A, 10, None) != first


def test_groups_are_shown_in_order() -> None:
    mirror = PrefillMirror(I)
    for request, model in enumerate((A, B, A)):
        mirror.add(RequestId(request), model, request + 1, None)
    mirror.running = B
    view = mirror.view()
    assert [group.model for group in view.groups] == [A, B, A]
    assert (view.instance, view.running) == (I, B)


def test_removing_somebody_unknown_changes_nothing() -> None:
    prefill, decode = PrefillMirror(I), DecodeMirror(I)
    prefill.add(RequestId(1), A, 1, None)
    decode.add(RequestId(1), A, 1)
    before = prefill.view(), decode.view({A: 10}, A, 1)
    prefill.remove(RequestId(9))
    decode.remove(RequestId(9), A)
    decode.remove(RequestId(9), B)
    assert (prefill.view(), decode.view({A: 10}, A, 1)) == before


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(1, 60)), max_size=30), st.integers(60, 200))
def test_batches_are_as_many_as_the_kv_capacity_makes_them(held: list[tuple[ModelId, int]], capacity: int) -> None:
    """Algorithm 2, line 2."""
    mirror = DecodeMirror(I)
    for request, (model, tokens) in enumerate(held):
        mirror.add(RequestId(request), model, tokens)
    capacities = {A: capacity, B: 2 * capacity}
    total = {model: sum(tokens for m, tokens in held if m == model) for model in (A, B)}
    batches = {model: -(-total[model] // capacities[model]) for model in (A, B)}
    view = mirror.view(capacities, A, 10)
    assert view.batches == sum(batches.values())
    assert (A in view.open_models) == (batches[A] * capacity - total[A] >= 10)
    assert B not in view.open_models


def test_a_batch_is_bounded_in_sequences_too() -> None:
    mirror = DecodeMirror(I)
    for request in range(MAX_BATCH):
        assert A in mirror.view({A: 10_000}, A, 1).open_models or request == 0
        mirror.add(RequestId(request), A, 1)
    full = mirror.view({A: 10_000}, A, 1)
    assert full.batches == 1 and not full.open_models
    mirror.add(RequestId(99), A, 1)
    assert mirror.view({A: 10_000}, A, 1).batches == 2


def test_who_left_counts_no_more() -> None:
    mirror = DecodeMirror(I)
    mirror.add(RequestId(1), A, 10)
    mirror.remove(RequestId(1), A)
    assert mirror.view({A: 10}, A, 1).batches == 0
