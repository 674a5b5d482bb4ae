"""A viewer gets each entry once, and never more than it can show."""

from __future__ import annotations

from aegis.core.ids import InstanceId, ModelId
from aegis.telemetry.history import History
from aegis.telemetry.live_view import SPANS_MAX, SeenUntil, updates_since
from aegis.telemetry.spans import Span, SpanKind


def span(number: int) -> Span:
    return Span(InstanceId("i"), SpanKind.DECODE, ModelId("m"), number, number + 1)


def test_news_go_on_where_the_last_ended() -> None:
    history = History(spans=9, records=9, decisions=9, token_times=False)
    history.spans.add(map(span, range(3)))
    first = updates_since(history, SeenUntil())
    assert [each.start_ns for each in first.spans] == [0, 1, 2]
    history.spans.add(map(span, range(3, 5)))
    second = updates_since(history, first.seen)
    assert [each.start_ns for each in second.spans] == [3, 4]
    assert updates_since(history, second.seen).spans == []


def test_who_saw_nothing_of_much_gets_the_last_of_it() -> None:
    history = History(spans=2 * SPANS_MAX, records=9, decisions=9, token_times=False)
    history.spans.add(map(span, range(2 * SPANS_MAX)))
    told = updates_since(history, SeenUntil())
    assert [told.spans[0].start_ns, told.spans[-1].start_ns] == [SPANS_MAX, 2 * SPANS_MAX - 1]
    assert told.seen.spans == 2 * SPANS_MAX
