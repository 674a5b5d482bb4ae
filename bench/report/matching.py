"""The spans of each request. Records hold the times of its arrival and its tokens, spans the work of instances; neither
names the other.

Its prefill, or the last chunk of it, is found by its model, its prompt's length and its end, right before the first
token. It was decoded on the instance on which a run of its model ended last before it did: a run ends when one of its
requests does.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span, SpanKind


@dataclass(frozen=True, slots=True)
class Match:
    """A request that finished; `run` is its last, None if the first token was all."""

    record: Record
    first_ns: int
    last_ns: int
    prefill: Span
    run: Span | None


def matches(records: Iterable[Record], spans: Sequence[Span]) -> tuple[list[Match], list[Record]]:
    """The requests that finished, in order of their first tokens, and those of them whose prefill was not found."""
    prefills = Ends(
        (each for span in spans if span.kind is SpanKind.PREFILL and span.steps for each in _of_each(span)),
        lambda span: (span.model, span.cached + span.tokens),
    )
    runs = Ends((span for span in spans if span.kind is SpanKind.DECODE), lambda span: span.model)
    found, lost = [], []
    for record in sorted(records, key=lambda record: (record.first_ns or 0, record.request)):
        if record.ended != "finished" or record.first_ns is None or record.last_ns is None:
            continue
        prefill = prefills.take((record.model, record.input_tokens), record.first_ns)
        if prefill is None or prefill.start_ns < record.arrival_ns:
            lost.append(record)
            continue
        run = runs.last(record.model, record.last_ns) if record.first_ns < record.last_ns else None
        found.append(Match(record, record.first_ns, record.last_ns, prefill, run))
    return found, lost


def _of_each(span: Span) -> list[Span]:
    """One for each prompt, where several shared a step."""
    if not span.pieces:
        return [span]
    return [replace(span, requests=1, tokens=stop - start, cached=start, pieces=()) for start, stop in span.pieces]


class Ends:
    """Spans by a key, in order of their ends."""

    def __init__(self, spans: Iterable[Span], key: Callable[[Span], Hashable]) -> None:
        self._spans: dict[Hashable, list[Span]] = {}
        for span in sorted(spans, key=_stop_ns):
            self._spans.setdefault(key(span), []).append(span)

    def last(self, key: Hashable, at_ns: int) -> Span | None:
        """The last that ended by then."""
        spans = self._spans.get(key, ())
        index = bisect_right(spans, at_ns, key=_stop_ns)
        return spans[index - 1] if index else None

    def next(self, key: Hashable, at_ns: int) -> Span | None:
        """The first that starts then or later; for spans of one instance, which start in order of their ends."""
        spans = self._spans.get(key, ())
        index = bisect_left(spans, at_ns, key=lambda span: span.start_ns)
        return spans[index] if index < len(spans) else None

    def take(self, key: Hashable, at_ns: int) -> Span | None:
        """The last run that ended by then, which no other request gets."""
        span = self.last(key, at_ns)
        if span is not None:
            self._spans[key].remove(span)
        return span


def _stop_ns(span: Span) -> int:
    return span.stop_ns
