"""Requests bear the number of their proxy."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aegis.core.ids import ProxyId, nth_request, proxy_of

proxies = st.integers(0, 1 << 20).map(ProxyId)
counts = st.integers(1, (1 << 40) - 1)


@given(proxies, counts)
def test_a_request_tells_its_proxy(proxy: ProxyId, count: int) -> None:
    assert proxy_of(nth_request(proxy, count)) == proxy


@given(proxies, counts, proxies, counts)
def test_no_two_have_the_same_number(proxy: ProxyId, count: int, other: ProxyId, other_count: int) -> None:
    same = nth_request(proxy, count) == nth_request(other, other_count)
    assert same == ((proxy, count) == (other, other_count))


def test_those_of_the_first_are_counted_from_one() -> None:
    assert [nth_request(ProxyId(0), count) for count in (1, 2)] == [1, 2]
