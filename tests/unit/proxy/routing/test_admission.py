"""Who is refused because it could not be served in time: the rule by itself, and a router's answers by it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace as replaced

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.estimators import Hardware, Latency
from aegis.core.ids import InstanceId, ModelId, ProxyId, RequestId
from aegis.core.messages import Phase, Prefilled, Started, StepsTook, SwitchDone, Tokens
from aegis.core.model import Slo
from aegis.core.request import Job, Sampling, Token
from aegis.core.role import Role
from aegis.core.views import ANSWER_TOKENS, PPM, Work
from aegis.node.proxy_links import ProxyLinks
from aegis.sim.faults.fake_models import make_spec
from aegis.telemetry.metrics.scrape import Family
from aegis.telemetry.model_counts import Tally
from aegis.transport.node_messages import ProxyEnd
from decode.policies.least_slack import LeastSlack
from prefill.policies.grouped_fcfs import GroupedFcfs
from proxy.routing.admission import Claim, wait_ns
from proxy.routing.demand import NOTHING, Demand
from proxy.routing.events import (
    ClientLeft,
    Event,
    InstanceDown,
    InstanceUp,
    MessageReceived,
    ModelRemoved,
    ModelUp,
    RequestArrived,
    SloSet,
)
from proxy.routing.router import Router

TTFT_NS, TBT_NS = 10 * NS_PER_S, 100 * NS_PER_MS
SPECS = [make_spec(number, image_pages=3, block_bytes=1024) for number in range(3)]
A, B, C = (spec.model for spec in SPECS)
HERE, THERE = InstanceId("mixed-0"), InstanceId("mixed-1")
HASTY = Slo(ttft_ns=NS_PER_MS, tbt_ns=20 * NS_PER_MS)
"""No first token comes so soon."""


def claim(
    steps: float,
    *,
    prefill_s: float = 0.0,
    worth: float = 1.0,
    loads: float = 0.0,
    memory: float = 0.0,
) -> Claim:
    demand = Demand(round(steps * PPM), round(loads * PPM), round(memory * PPM))
    return Claim(demand, round(prefill_s * NS_PER_S), worth, TTFT_NS, TBT_NS)


CLAIMS = st.builds(
    claim,
    st.floats(0, 3),
    prefill_s=st.floats(0, 60),
    worth=st.floats(0.01, 100),
    loads=st.floats(0, 2),
    memory=st.floats(0, 3),
)


def wants(*claims: Claim) -> float:
    """The share of an instance's time."""
    together = NOTHING
    for each in claims:
        together = together.instead(NOTHING, each.demand)
    return together.load_ppm / PPM + sum(each.prefill_ns for each in claims) / TTFT_NS


# --- the rule -------------------------------------------------------------------------------------------------------


@given(CLAIMS, st.lists(CLAIMS, max_size=6))
def test_where_there_is_time_for_all_nobody_waits_for_longer_than_it_may(own: Claim, others: list[Claim]) -> None:
    """Whatever is asked for is made small enough."""
    share = max(wants(own, *others), 1.0) * 1.001
    own, *others = (_scaled(each, share) for each in (own, *others))
    assume(wants(own, *others) <= 1)
    assert wait_ns(own, others) <= TTFT_NS


def _scaled(each: Claim, share: float) -> Claim:
    demand = each.demand
    less = Demand(int(demand.steps_ppm / share), int(demand.loads_ppm / share), demand.memory_ppm)
    return replace(each, demand=less, prefill_ns=int(each.prefill_ns / share))


@given(CLAIMS, st.lists(CLAIMS, max_size=6), CLAIMS)
def test_waits_are_finite_and_more_before_one_makes_none_shorter(own: Claim, others: list[Claim], more: Claim) -> None:
    wait = wait_ns(own, others)
    assert own.prefill_ns <= wait < 10**15
    assert wait_ns(own, [*others, more]) >= wait


@given(CLAIMS, st.lists(CLAIMS, max_size=6), st.floats(0, 2), st.floats(0, 2))
def test_more_time_makes_no_wait_longer(own: Claim, others: list[Claim], one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert wait_ns(own, others, more) <= wait_ns(own, others, less) < 10**15


def test_half_the_time_is_as_steps_that_take_twice_as_long() -> None:
    for time in (0.35, 0.45, 1.2):
        as_seen = wait_ns(claim(0.1, prefill_s=1), [claim(0.3, worth=100)], time)
        assert as_seen == pytest.approx(wait_ns(claim(0.2, prefill_s=2), [claim(0.6, worth=100)], 2 * time), rel=1e-3)


@given(CLAIMS, st.lists(CLAIMS, max_size=6))
def test_nobody_waits_for_those_that_make_fewer_tokens_on_time_a_second(own: Claim, others: list[Claim]) -> None:
    before = [other for other in others if other.density >= own.density]
    assert wait_ns(own, others) == wait_ns(own, before)
    assert wait_ns(replace(own, worth=1e12), others) == wait_ns(own, [])


def test_a_request_waits_until_answers_before_it_have_left_it_room() -> None:
    hot, cold = claim(0.9, worth=100), claim(0.3)
    assert wait_ns(hot, [cold]) == 0
    some = wait_ns(cold, [hot])
    slow_hot, slow_cold = (replace(each, tbt_ns=3 * TBT_NS) for each in (hot, cold))
    assert 0 < some < ANSWER_TOKENS * TBT_NS and wait_ns(slow_cold, [slow_hot]) == pytest.approx(3 * some)
    assert wait_ns(cold, [hot, replace(hot, worth=99)]) > some


def test_where_requests_of_one_model_want_more_than_all_time_the_next_one_waits_for_them() -> None:
    assert wait_ns(claim(1.0), []) == 0 < wait_ns(claim(1.1), []) < wait_ns(claim(1.2), [])


def test_a_little_more_load_is_a_little_longer_wait() -> None:
    """No step where not all have room any more."""
    own = claim(0.2, prefill_s=1)
    waits = [wait_ns(own, [claim(steps / 1000, worth=1e9)]) for steps in range(700, 900)]
    assert waits == sorted(waits) and max(b - a for a, b in pairwise(waits)) < NS_PER_S / 5


# --- a router's answers ---------------------------------------------------------------------------------------------


class Pool:
    """A router that is told of requests."""

    def __init__(self, *instances: InstanceId, slo: Slo = HASTY, capacity_tokens: int = 100_000) -> None:
        self.core = Router(GroupedFcfs(), LeastSlack(), Hardware())
        for spec in SPECS:
            self.tell(ModelUp(replaced(spec, slo=slo), capacity_tokens))
        for name in instances:
            self.tell(InstanceUp(name, Role(name.partition("-")[0])))

    def tell(self, event: Event, now_ns: int = 0) -> None:
        self.core.on(event, now_ns)

    def arrive(self, request: int, model: ModelId, *, tokens: int = 50, priority: int = 0) -> None:
        job = Job(RequestId(request), 1, model, (1,) * tokens, Sampling(max_tokens=999), 0, priority=priority)
        self.tell(RequestArrived(job))

    def begin(self, request: int) -> None:
        """It has its first token."""
        at, named = HERE, RequestId(request)
        for message in (Started(named, 1), Prefilled(named, 1, Token(5), None, 1), Phase((named,), running=True)):
            self.tell(MessageReceived(at, message))

    def stream(self, request: int, at: InstanceId, first: int, now_ns: int) -> None:
        """One more token of it came."""
        message = Tokens(RequestId(request), 1, first, (Token(5),), None)
        self.tell(MessageReceived(at, message), now_ns)

    def late_ns(self, model: ModelId, *, tokens: int = 50, priority: int = 0, now_ns: int = 0) -> int | None:
        return self.core.admission.late_ns(Work(model, tokens), priority, now_ns)

    def expected_ns(self, model: ModelId, *, priority: int = 0) -> int:
        expected_ns = self.core.admission.expected_ns(Work(model, 50), priority, now_ns=0)
        assert expected_ns is not None
        return expected_ns


@given(st.integers(1, 90_000), st.integers(-5, 5), st.sampled_from([(HERE,), (InstanceId("prefill-0"), HERE)]))
def test_an_idle_instance_refuses_nobody(tokens: int, priority: int, instances: tuple[InstanceId, ...]) -> None:
    pool = Pool(*instances)
    assert pool.late_ns(A, tokens=tokens, priority=priority) is None
    pool.arrive(1, B)
    assert (pool.late_ns(A, tokens=tokens, priority=priority) or 0) > 0, "but one that is not does, by these deadlines"
    pool.tell(ClientLeft(RequestId(1)))
    assert pool.late_ns(A, tokens=tokens, priority=priority) is None


def test_who_can_be_served_in_time_somewhere_is_not_refused() -> None:
    pool = Pool(HERE)
    pool.arrive(1, A)
    assert pool.late_ns(A)
    pool.tell(InstanceUp(THERE, Role.MIXED))
    assert pool.late_ns(A) is None
    pool.tell(InstanceDown(THERE, for_good=True))
    assert pool.late_ns(A)


def test_nobody_can_tell_of_a_model_that_is_not_there() -> None:
    pool = Pool(HERE)
    pool.arrive(1, A)
    assert pool.late_ns(ModelId("other")) is None
    pool.tell(ModelRemoved(A))
    assert pool.late_ns(A) is None


def test_who_was_refused_is_taken_when_it_would_wait_clearly_less() -> None:
    pool = Pool(HERE)
    pool.arrive(1, B)
    wait_ns = pool.expected_ns(A)

    def refused_within(ns: int) -> int | None:
        for model in (A, B):
            pool.tell(SloSet(model, Slo(ttft_ns=ns, tbt_ns=HASTY.tbt_ns)))
        return pool.late_ns(A)

    assert refused_within(wait_ns + 1000) is None
    assert refused_within(wait_ns // 2)
    assert refused_within(wait_ns + 1000), "it is refused still"
    assert refused_within(wait_ns * 2) is None
    assert refused_within(wait_ns + 1000) is None, "and taken still"


def test_weights_that_do_not_fit_together_keep_few_out_while_there_is_time_for_steps() -> None:
    """Many are loaded while others compute; before its own token the request waits for those of its model."""
    latency = Latency(SPECS[0].manifest, Hardware())
    least_ns = latency.switch_ns() + latency.prefill_ns(50)
    pool = Pool(HERE, slo=Slo(ttft_ns=round(1.4 * least_ns), tbt_ns=NS_PER_S), capacity_tokens=100)
    for request, model in enumerate((A, B), 1):
        pool.arrive(request, model)
        pool.begin(request)
    assert pool.late_ns(C) is None
    pool.tell(SloSet(C, Slo(ttft_ns=round(0.95 * least_ns), tbt_ns=NS_PER_S)))
    assert pool.late_ns(C)


def test_asking_places_nobody() -> None:
    pool = Pool(HERE)
    pool.arrive(1, A)
    before = (pool.core.loads(), pool.core.load_ppm(), pool.core.sample(), pool.core.states())
    assert pool.late_ns(B)
    assert (pool.core.loads(), pool.core.load_ppm(), pool.core.sample(), pool.core.states()) == before


SHORT_OF = 0.6
"""Of the time that all want of an instance, so that it has not enough for them."""


def crowded() -> Pool:
    """Each model wants most of the instance's time, and A has most requests."""
    pool = Pool(HERE, slo=Slo(ttft_ns=TTFT_NS, tbt_ns=HASTY.tbt_ns))
    for request in range(1, 9):
        pool.arrive(request, A if request > 3 else B, tokens=20)
        pool.begin(request)
    need_ns = SHORT_OF * pool.core.load_ppm()[HERE] * HASTY.tbt_ns // PPM
    for model in (A, B, C):
        pool.tell(SloSet(model, Slo(ttft_ns=TTFT_NS, tbt_ns=round(need_ns))))
    return pool


def test_the_more_urgent_a_request_is_the_less_it_waits() -> None:
    pool = crowded()
    assert pool.expected_ns(C, priority=-6) < pool.expected_ns(C)
    pool.arrive(20, B, priority=-6)
    waits = pool.expected_ns(A)
    assert waits > pool.expected_ns(B)
    pool.tell(ClientLeft(RequestId(20)))
    assert pool.expected_ns(A) < waits


# --- several proxies ------------------------------------------------------------------------------------------------


class End:
    """As `ProxyEnd`."""

    address = ""

    def __init__(self, pool: Pool) -> None:
        self.deliver = pool.tell

    async def scrape(self) -> tuple[Family, ...]:
        return ()

    def tallies(self) -> list[Tally]:
        return []


class Pools:
    """Proxies of one node, which hears of their loads when it is said."""

    def __init__(self, count: int) -> None:
        self.all = [Pool(HERE) for _ in range(count)]
        self._links = ProxyLinks()
        for number, pool in enumerate(self.all):
            self._links.join(ProxyId(number), cast(ProxyEnd, End(pool)))

    def report(self) -> None:
        for number, pool in enumerate(self.all):
            self._links.loads(ProxyId(number), pool.core.loads())
        self._links.share()


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([A, B, C]), st.integers(1, 5000), st.integers(-3, 3)), max_size=8
)
"""The proxy that gets it, the model, the tokens, the priority."""


@given(ARRIVALS, st.sampled_from([A, B, C]), st.integers(-3, 3))
def test_no_wait_seems_shorter_to_one_of_several_proxies_than_to_one_that_has_all_requests(
    arrivals: list[tuple[int, ModelId, int, int]], model: ModelId, priority: int
) -> None:
    one, several = Pool(HERE), Pools(3)
    for number, (at, asked, tokens, urgency) in enumerate(arrivals, 1):
        for pool in (one, several.all[at]):
            pool.arrive(number, asked, tokens=tokens, priority=urgency)
    several.report()
    waits_ns = one.expected_ns(model, priority=priority)
    assert min(pool.expected_ns(model, priority=priority) for pool in several.all) >= waits_ns


def taken(proxies: int, period: int) -> int:
    """Of 90 requests of a model that come in turn to each proxy, where they hear of each other after so many."""
    several, count = Pools(proxies), 0
    for pool in several.all:
        pool.tell(SloSet(A, Slo(ttft_ns=TTFT_NS, tbt_ns=TBT_NS)))
    for number in range(90):
        if number % period == 0:
            several.report()
        pool = several.all[number % proxies]
        if pool.late_ns(A, tokens=20_000) is None:
            pool.arrive(number + 1, A, tokens=20_000)
            count += 1
    return count


@pytest.mark.parametrize("proxies", [2, 4])
def test_what_is_taken_twice_is_no_more_than_what_others_took_since_they_were_last_heard_of(proxies: int) -> None:
    alone = taken(1, 1)
    assert 0 < alone < 90
    assert taken(proxies, 1) >= 0.95 * alone, "nor is anybody refused for requests that come after theirs"
    for period in (1, 4, 12, 24):
        assert taken(proxies, period) <= alone + period


# --- what instances have time for -------------------------------------------------------------------------------------


END_NS = 8 * TTFT_NS


def streaming(every_ns: int, *instances: InstanceId, work_share: float) -> Pool:
    """A stream of A has had tokens so often, and wants half of the instance's time."""
    pool = Pool(*instances, slo=Slo(ttft_ns=TTFT_NS, tbt_ns=TBT_NS))
    pool.arrive(1, A)
    pool.begin(1)
    for _ in range(50):
        pool.tell(MessageReceived(HERE, StepsTook(A, 50, 1, TBT_NS // 2, work_share)))
    for number in range(1, END_NS // every_ns + 1):
        pool.stream(1, HERE, number, number * every_ns)
    return pool


def test_who_would_join_streams_that_lack_tokens_is_refused_where_there_is_less_time_than_for_all() -> None:
    assert streaming(TBT_NS, HERE, work_share=0.3).late_ns(A, now_ns=END_NS) is None, "they lack none"
    assert streaming(3 * TBT_NS, HERE, work_share=1).late_ns(A, now_ns=END_NS) is None, "there is time for all"
    behind = streaming(3 * TBT_NS, HERE, work_share=0.3)
    assert behind.core.load_ppm()[HERE] < PPM, "by the estimates there is time"
    assert (behind.late_ns(A, now_ns=END_NS) or 0) > 0
    behind.tell(ClientLeft(RequestId(1)), END_NS)
    assert behind.late_ns(A, now_ns=END_NS) is None


def test_another_instance_takes_who_would_be_late_here() -> None:
    pool = streaming(3 * TBT_NS, HERE, THERE, work_share=0.3)
    pool.arrive(2, B)
    assert {load.instance: len(load.models) for load in pool.core.loads()} == {HERE: 1, THERE: 1}
    assert pool.late_ns(A, now_ns=END_NS) is None
    pool.tell(InstanceDown(THERE, for_good=True), END_NS)
    assert pool.late_ns(A, now_ns=END_NS)


def test_who_joins_streams_that_go_on_side_by_side_is_taken() -> None:
    """Two models want six tenths of the time each."""
    alone = Pool(HERE, slo=Slo(ttft_ns=TTFT_NS, tbt_ns=TBT_NS))
    alone.arrive(1, A)
    tbt_ns = round(TBT_NS * alone.core.load_ppm()[HERE] / PPM / 0.6)
    pool = Pool(HERE, slo=Slo(ttft_ns=40 * tbt_ns, tbt_ns=tbt_ns))
    for request, model in enumerate((A, C, C), start=1):
        pool.arrive(request, model)
        pool.begin(request)
    assert (pool.late_ns(A, tokens=1) or 0) > 0
    pool.tell(MessageReceived(HERE, SwitchDone(A, True, 0, 0, 0, 1, work_share=1.3)))
    assert pool.late_ns(A, tokens=1) is None
    pool.tell(MessageReceived(HERE, SwitchDone(C, True, 0, 0, 0, 1, work_share=0.9)))
    assert (pool.late_ns(A, tokens=1) or 0) > 0
