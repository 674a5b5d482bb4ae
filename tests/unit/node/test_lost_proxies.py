"""KV that was handed over for a lost proxy is released once, when nothing reads it any more."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aegis.core.ids import InstanceId, ProxyId
from aegis.node.lost_proxies import LostProxies

A, B, C = (InstanceId(name) for name in "abc")
LOST, OTHER = ProxyId(1), ProxyId(2)


def test_all_have_to_drop_it() -> None:
    lost_proxies = LostProxies()
    lost_proxies.begin(LOST, [A, B])
    assert not lost_proxies.dropped(LOST, A)
    assert lost_proxies.dropped(LOST, B)


def test_nobody_waits_for_an_instance_that_is_lost_too() -> None:
    lost_proxies = LostProxies()
    lost_proxies.begin(LOST, [A, B])
    lost_proxies.begin(OTHER, [A])
    assert lost_proxies.lost(A) == [OTHER]
    assert lost_proxies.lost(B) == [LOST]
    assert lost_proxies.lost(C) == []


@given(st.permutations([A, B, C]), st.lists(st.booleans(), min_size=3, max_size=3))
def test_the_end_comes_once_and_last(order: list[InstanceId], dies: list[bool]) -> None:
    lost_proxies = LostProxies()
    lost_proxies.begin(LOST, [A, B, C])
    ended = [
        LOST in lost_proxies.lost(instance) if dying else lost_proxies.dropped(LOST, instance)
        for instance, dying in zip(order, dies, strict=True)
    ]
    assert ended == [False, False, True]
