"""More and less traffic of the same market."""

from __future__ import annotations

from collections import Counter

import pytest

from aegis.core.clock import NS_PER_S
from bench.workloads import spec
from bench.workloads.arrival import Arrival, model_name
from bench.workloads.load import at_load

MARKET = spec.parse("poisson:models=5,rps=0.4,duration=300", 0)


def models(arrivals: list[Arrival]) -> Counter[str]:
    return Counter(arrival.model for arrival in arrivals)


def without_times(arrivals: list[Arrival]) -> Counter[tuple[str, int, int]]:
    return Counter((each.model, each.input_tokens, each.output_tokens) for each in arrivals)


def test_at_once_the_traffic_it_is_the_workload() -> None:
    assert at_load(MARKET, 1.0) == MARKET
    assert at_load([], 3.0) == []


def test_at_a_multiple_each_request_comes_so_often_in_the_same_time() -> None:
    thrice = at_load(MARKET, 3.0)
    assert without_times(thrice) == Counter({what: 3 * times for what, times in without_times(MARKET).items()})
    assert set(MARKET) < set(thrice)
    assert max(each.at_ns for each in thrice) <= MARKET[-1].at_ns
    assert thrice == sorted(thrice, key=lambda each: (each.at_ns, each.model))


def test_a_copy_comes_a_minute_later_and_what_leaves_at_the_end_comes_at_the_start() -> None:
    first, last = MARKET[0], MARKET[-1]
    twice = at_load(MARKET, 2.0)
    assert any(each.at_ns == first.at_ns + 60 * NS_PER_S and each.model == first.model for each in twice)
    assert any(each.at_ns == 60 * NS_PER_S - 1 and each.model == last.model for each in twice)


@pytest.mark.parametrize("load", [0.5, 1.5, 2.25])
def test_of_the_last_copy_requests_are_taken_evenly(load: float) -> None:
    found = at_load(MARKET, load)
    assert len(found) == int(len(MARKET) * load) or len(found) == int(len(MARKET) * load) + 1
    middle_ns = MARKET[-1].at_ns // 2
    assert sum(each.at_ns < middle_ns for each in found) == pytest.approx(len(found) / 2, rel=0.1)
    for model, times in models(MARKET).items():
        assert models(found)[model] == pytest.approx(times * load, rel=0.2)


def test_copies_of_a_short_workload_do_not_coincide() -> None:
    burst = [Arrival(0, model_name(0), 1, 1), Arrival(60 * NS_PER_S - 1, model_name(0), 1, 1)]
    times = [each.at_ns for each in at_load(burst, 4.0)]
    assert len(set(times)) == len(times) == 8
