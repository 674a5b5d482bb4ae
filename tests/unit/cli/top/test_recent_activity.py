"""Shares and rates of the last minute, from what a server told."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from aegis.cli.top.recent_activity import FollowedServer, RecentActivity
from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.role import Role
from aegis.telemetry.live_view import Live, LiveInstance, LiveModel, LiveUpdate, SeenUntil
from aegis.telemetry.memory_report import HostKvReport, MemoryReport, ModelCacheReport, SlabsReport
from aegis.telemetry.model_counts import Tally
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span, SpanKind

I, M = InstanceId("mixed-0"), ModelId("m")  # noqa: E741
MEMORY = MemoryReport((), HostKvReport(8, 4, 4, 0, 0, SlabsReport(0, 0.0, ())), ModelCacheReport(0, 0, (), {}))


def live(at_s: float, *spans: Span, start: int = 1, records: tuple[Record, ...] = (), **tally: int) -> Live:
    news = LiveUpdate(SeenUntil(spans=round(at_s)), list(spans), [], list(records))
    model = LiveModel(0, "ready", "cached", Tally(M, **tally))
    instance = LiveInstance(I, Role.MIXED, 0, "up", M)
    return Live(start, "1", "least-slack", round(at_s * NS_PER_S), [instance], [model], MEMORY, news)


def span(kind: SpanKind, start_s: float, stop_s: float) -> Span:
    return Span(I, kind, M, round(start_s * NS_PER_S), round(stop_s * NS_PER_S))


def watched(*answers: Live) -> RecentActivity:
    activity = RecentActivity()
    for answer in answers:
        activity.add(answer)
    return activity


def test_tokens_a_second_are_those_of_the_last_five() -> None:
    last = live(10, tokens=150)
    activity = watched(live(0, tokens=0), live(5, tokens=100), last)
    assert activity.summary(last).tokens_per_s == 10
    (row,) = activity.models(last)
    assert row.tokens_per_s == 10


def test_what_was_due_before_the_last_minute_does_not_count() -> None:
    last = live(70, due=300, met=190)
    activity = watched(live(0), live(10, due=100, met=0), last)
    assert activity.summary(last).on_time == pytest.approx(0.95)
    assert watched(live(0, due=9)).summary(live(0)).on_time is None


def test_an_instance_is_busy_while_it_runs() -> None:
    last = live(10, span(SpanKind.DECODE, 4, 6), span(SpanKind.PREFILL, 8, 9), span(SpanKind.LOAD, 0, 10))
    (row,) = watched(live(0), last).instances(last)
    assert row.busy == pytest.approx(2 / 5)


def test_switches_and_first_tokens_of_the_last_minute() -> None:
    record = Record(RequestId(1), M, 0, 5, 5, "finished", 5, first_ns=40 * NS_PER_MS)
    first = live(1, span(SpanKind.SWITCH, 0, 1), records=(record, replace(record, first_ns=60 * NS_PER_MS)))
    activity = watched(first)
    assert (activity.summary(first).switches, activity.models(first)[0].first_token_ms) == (1, 50)
    last = live(70)
    activity.add(last)
    assert (activity.summary(last).switches, activity.models(last)[0].first_token_ms) == (0, None)


def test_another_start_is_asked_for_from_its_beginning() -> None:
    server = FollowedServer()
    assert server.add(live(5, tokens=100))
    assert server.seen == SeenUntil(spans=5)
    assert not server.add(live(9, start=2, tokens=7))
    assert server.seen == SeenUntil()
    assert server.add(live(10, start=2, tokens=8))
    assert server.activity.summary(live(10, start=2)).tokens_per_s == 0
