"""The stages in which requests spent their time."""

import pytest

from bench.report.latency import STAGES, stages
from bench.report.matching import matches
from bench.report.run import Run
from tests.unit.bench.report.made import MS, outcome, record, simulated, span


def test_each_stage_of_a_request() -> None:
    spans = [
        span("switch", 12, 17, on="prefill-0"),
        span("prefill", 20, 30, on="prefill-0", steps=1, tokens=4, cached=6),
        span("prefill", 30, 30.5, on="prefill-0", steps=0, tokens=10),
        span("decode", 40, 50),
        span("decode", 50, 55, model="b"),
        span("switch", 55, 58),
        span("decode", 60, 70),
        span("decode", 40, 80, on="decode-1", model="b"),
    ]
    told = stages(Run("one", spans, [record(1, 10, 31, 71)]))
    assert told.requests == 1
    assert {stage: told.total_ns[stage] / MS for stage in STAGES} == {
        "prefill waiting": 5,
        "prefill": 11,
        "decode waiting": 17,
        "decoding": 20,
        "switching": 8,
    }


def test_the_stages_of_a_simulation_are_all_of_its_time() -> None:
    run = simulated()
    told = stages(run)
    assert (told.requests, told.unmatched) == (len(run.records), 0)
    assert sum(told.total_ns.values()) == sum((each.last_ns or 0) - each.arrival_ns for each in run.records)
    assert all(ns > 0 for ns in told.total_ns.values())
    assert sum(map(told.share, STAGES)) == pytest.approx(1)


def test_the_prefill_of_each_request_is_found() -> None:
    run = simulated()
    found, lost = matches(run.records, run.spans)
    assert lost == [] and len({id(match.prefill) for match in found}) == len(found) == len(outcome().records)
    assert {match.first_ns - match.prefill.stop_ns for match in found} == {100_000}  # a message to the proxy
    assert {match.last_ns - match.run.stop_ns for match in found if match.run} == {100_000}


def test_requests_whose_prefill_is_not_there_are_counted() -> None:
    told = stages(Run("one", [span("prefill", 20, 30, steps=1, tokens=11)], [record(1, 10, 31, 71)]))
    assert (told.requests, told.unmatched) == (0, 1)


def test_a_clients_clock_is_not_a_servers() -> None:
    spans = [span("prefill", 1e9, 1e9 + 10, tokens=10)]
    assert not Run("one", spans, [record(1, 10, 31, 71)]).one_clock
    assert Run("one", spans, [record(1, 1e9 - 5, 1e9 + 10, 1e9 + 20)]).one_clock
