"""How long changes of model took (Aegaeon §7.3, Figure 15 left)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from aegis.core.ids import InstanceId, ModelId
from aegis.telemetry.spans import Span, SpanKind


@dataclass(frozen=True, slots=True)
class Switches:
    """Durations in ascending order; `prefetched` where no load began during the change: the weights had come before, or
    were on their way."""

    prefetched_ns: tuple[int, ...]
    loaded_ns: tuple[int, ...]


def switches(spans: Iterable[Span]) -> Switches:
    changes: list[Span] = []
    loads: dict[tuple[InstanceId, ModelId], list[int]] = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        if span.kind is SpanKind.SWITCH:
            changes.append(span)
        elif span.kind is SpanKind.LOAD:
            loads.setdefault((span.instance, span.model), []).append(span.start_ns)
    prefetched: list[int] = []
    loaded: list[int] = []
    for span in changes:
        starts = loads.get((span.instance, span.model), [])
        at = bisect_left(starts, span.start_ns)
        began = at < len(starts) and starts[at] < span.stop_ns
        (loaded if began else prefetched).append(span.stop_ns - span.start_ns)
    return Switches(tuple(sorted(prefetched)), tuple(sorted(loaded)))


def cumulative(ordered: Sequence[float], points: int = 200) -> list[tuple[float, float]]:
    """At most so many `(value, share that is no larger)` of values in ascending order."""
    count = len(ordered)
    ranks = sorted({max(-(-count * point // points), 1) for point in range(points + 1)}) if count else []
    return [(ordered[rank - 1], rank / count) for rank in ranks]
