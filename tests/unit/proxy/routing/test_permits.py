"""Limits hold whatever is asked when, and what is refused uses nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aegis.core.clock import NS_PER_S
from aegis.core.ids import ProxyId
from aegis.core.limits import Limits, Scope
from proxy.routing.permits import WINDOW_NS, Permits, TooMany

HERE, THERE = ProxyId(0), ProxyId(1)


def key(**limits: int) -> Scope:
    return Scope("key", "alice", Limits(**limits))


def test_a_minute_s_worth_of_requests_may_come_at_once_then_one_at_a_time() -> None:
    permits, scopes = Permits(), [key(requests_per_minute=3)]
    assert [permits.ask(HERE, n, scopes, 0) for n in range(3)] == [None] * 3
    refused = permits.ask(HERE, 3, scopes, 0)
    assert refused == TooMany("key 'alice' has used its 3 requests per minute", 20 * NS_PER_S, "key")
    assert permits.ask(HERE, 3, scopes, 20 * NS_PER_S - 1) is not None
    assert permits.ask(HERE, 3, scopes, 20 * NS_PER_S) is None


def test_an_answer_s_tokens_are_paid_for_after_it() -> None:
    permits, scopes = Permits(), [key(tokens_per_minute=100)]
    assert permits.ask(HERE, 0, scopes, 0) is None
    permits.use(HERE, 0, 40, 0)
    permits.close(HERE, 0, 90, 0)
    refused = permits.ask(HERE, 1, scopes, 0)
    assert refused and "100 tokens per minute" in refused.what
    assert refused.wait_ns == 18 * NS_PER_S + 1
    assert permits.ask(HERE, 1, scopes, refused.wait_ns) is None


def test_a_prompt_longer_than_a_minute_s_worth_is_not_refused_for_ever() -> None:
    permits, scopes = Permits(), [key(tokens_per_minute=10)]
    assert permits.ask(HERE, 0, scopes, 0) is None
    permits.use(HERE, 0, 1000, 0)
    refused = permits.ask(HERE, 1, scopes, 0)
    assert refused and permits.ask(HERE, 1, scopes, refused.wait_ns) is None


def test_no_more_run_at_once_than_may_and_whose_proxy_is_lost_do_not_run() -> None:
    permits, scopes = Permits(), [key(concurrent=2)]
    assert permits.ask(HERE, 0, scopes, 0) is permits.ask(THERE, 0, scopes, 0) is None
    refused = permits.ask(HERE, 1, scopes, 0)
    assert refused and "2 of 2 requests at once" in refused.what
    permits.lost(THERE, 0)
    assert permits.running("key", "alice") == 1
    assert permits.ask(HERE, 1, scopes, 0) is None


def test_whoever_had_no_permit_has_none_to_close() -> None:
    permits = Permits()
    permits.use(HERE, 7, 100, 0)
    permits.close(HERE, 7, 100, 0)
    assert permits.running("key", "alice") == 0


def test_of_several_limits_the_longest_wait_is_told_and_none_is_used() -> None:
    permits, model = Permits(), Scope("model", "m", Limits(requests_per_minute=1))
    assert permits.ask(HERE, 0, [model], 0) is None
    refused = permits.ask(HERE, 1, [key(concurrent=1), model], 0)
    assert refused and refused.what.startswith("model 'm'")
    assert permits.running("key", "alice") == 0


@given(
    rate=st.integers(1, 100),
    steps=st.lists(st.tuples(st.integers(0, 20 * NS_PER_S), st.booleans()), max_size=120),
)
def test_in_any_time_no_more_begin_than_a_minute_s_worth_and_its_share(
    rate: int, steps: list[tuple[int, bool]]
) -> None:
    permits, scopes, now_ns, begun = Permits(), [key(requests_per_minute=rate)], 0, []
    for number, (pause_ns, proxy) in enumerate(steps):
        now_ns += pause_ns
        refused = permits.ask(ProxyId(proxy), number, scopes, now_ns)
        if refused is None:
            begun.append(now_ns)
        else:
            assert permits.ask(ProxyId(proxy), number, scopes, now_ns + refused.wait_ns - 1) is not None
    for at, since_ns in enumerate(begun):
        for more, until_ns in enumerate(begun[at:], start=1):
            assert (more - rate) * (WINDOW_NS // rate) <= until_ns - since_ns
