"""Why a span is there: the decision that led to it."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping

from aegis.core.decision import Decision, DecisionKind
from aegis.core.ids import InstanceId
from aegis.telemetry.spans import Span, SpanKind

_LED_TO = (SpanKind.PREFILL, SpanKind.DECODE, SpanKind.SWITCH)
_OF_INSTANCES = (DecisionKind.TURN, DecisionKind.PREFILL)


class Reasons:
    """What was decided on each instance, to be found by what came of it."""

    def __init__(self, decisions: Iterable[Decision]) -> None:
        self._of: Mapping[InstanceId, list[Decision]] = defaultdict(list)
        for each in sorted(decisions, key=lambda each: each.at_ns):
            if each.kind in _OF_INSTANCES:
                self._of[each.instance].append(each)

    def line(self, span: Span) -> str:
        """Of the last decision before the span began, if that was for its model; empty otherwise. A switch begins with
        its turn, or on prefill instances before the prefill that it is for."""
        known = self._of.get(span.instance, [])
        at_ns = span.stop_ns if span.kind is SpanKind.SWITCH else span.start_ns
        at = bisect_right(known, at_ns, key=lambda each: each.at_ns) - 1
        found = span.kind in _LED_TO and at >= 0 and known[at].model == span.model
        return known[at].line if found else ""
