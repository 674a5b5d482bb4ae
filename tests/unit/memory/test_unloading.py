"""Models that are to leave all memory: when their images may."""

from __future__ import annotations

from aegis.core.ids import InstanceId, ModelId
from memory.unloading import Unloading

A, B = InstanceId("decode-0"), InstanceId("decode-1")
K, L = ModelId("k"), ModelId("l")


def test_an_image_leaves_when_every_instance_has_answered_or_is_lost() -> None:
    unloading = Unloading()
    assert not unloading.begin(K, [A, B]) and not unloading.begin(L, [A])
    assert not unloading.answered(K, A)
    assert unloading.lost(B) == [K]
    assert unloading.lost(A) == [L]
    assert not unloading


def test_where_there_is_no_instance_it_leaves_at_once() -> None:
    unloading = Unloading()
    assert unloading.begin(K, []) and not unloading


def test_an_image_that_is_wanted_again_stays() -> None:
    unloading = Unloading()
    unloading.begin(K, [A])
    unloading.wanted(K)
    unloading.wanted(L)
    assert not unloading.answered(K, A) and unloading.lost(A) == []


def test_asked_again_all_are_waited_for_anew() -> None:
    unloading = Unloading()
    unloading.begin(K, [A, B])
    unloading.answered(K, A)
    assert not unloading.begin(K, [A, B])
    assert not unloading.answered(K, B) and unloading.answered(K, A)
