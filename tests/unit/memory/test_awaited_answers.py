"""Answers that are awaited: the end comes once, with the last of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aegis.core.ids import InstanceId, ModelId
from memory.awaited_answers import AwaitedAnswers

A, B, C = (InstanceId(name) for name in "abc")
K, L = ModelId("k"), ModelId("l")


def test_all_have_to_answer_or_be_lost() -> None:
    unloading = AwaitedAnswers[ModelId]()
    assert not unloading.begin(K, [A, B]) and not unloading.begin(L, [A])
    assert not unloading.answered(K, A)
    assert unloading.lost(C) == []
    assert unloading.lost(B) == [K]
    assert unloading.lost(A) == [L]
    assert not unloading


def test_where_there_is_no_instance_none_is_awaited() -> None:
    unloading = AwaitedAnswers[ModelId]()
    assert unloading.begin(K, []) and not unloading


def test_what_was_forgotten_never_ends() -> None:
    unloading = AwaitedAnswers[ModelId]()
    unloading.begin(K, [A])
    unloading.forget(K)
    unloading.forget(L)
    assert not unloading.answered(K, A) and unloading.lost(A) == []


def test_asked_again_all_are_waited_for_anew() -> None:
    unloading = AwaitedAnswers[ModelId]()
    unloading.begin(K, [A, B])
    unloading.answered(K, A)
    assert not unloading.begin(K, [A, B])
    assert not unloading.answered(K, B) and unloading.answered(K, A)


@given(st.permutations([A, B, C]), st.lists(st.booleans(), min_size=3, max_size=3))
def test_the_end_comes_once_and_last(order: list[InstanceId], dies: list[bool]) -> None:
    unloading = AwaitedAnswers[ModelId]()
    unloading.begin(K, [A, B, C])
    ended = [
        K in unloading.lost(instance) if dying else unloading.answered(K, instance)
        for instance, dying in zip(order, dies, strict=True)
    ]
    assert ended == [False, False, True]
