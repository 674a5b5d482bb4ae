"""How busy GPUs are over time (Aegaeon §7.5, Figure 18)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from aegis.core.clock import NS_PER_S
from aegis.core.ids import InstanceId
from aegis.sim.simulation import Outcome
from aegis.telemetry.spans import Span, SpanKind
from bench.simulate.figures import figures
from bench.simulate.setting import Setting, run

_BUSY = (SpanKind.PREFILL, SpanKind.DECODE)
_EVERY_S = 60
_WHOLE = 1_000  # the share of a run that has all of a GPU


class Utilisation(Struct, frozen=True):
    """The share of the time in which GPUs compute: of the idlest, the busiest, and all of them; and of all in each
    minute. A lane counts by its share. `attainment`: tokens on time."""

    gpus: int
    lowest: float
    highest: float
    mean: float
    by_minute: tuple[float, ...]
    attainment: float


def measure(setting: Setting) -> Utilisation:
    """Raises UserError."""
    return utilisation(run(setting))


def utilisation(outcome: Outcome) -> Utilisation:
    instances, ended_ns = list(outcome.counters), max(outcome.ended_ns, 1)
    each = [_busy_ns(outcome.spans, instance) / ended_ns for instance in instances]
    return Utilisation(
        gpus=len(instances),
        lowest=round(min(each), 4),
        highest=round(max(each), 4),
        mean=round(sum(each) / len(each), 4),
        by_minute=_by_minute(outcome.spans, len(instances), ended_ns),
        attainment=round(figures(outcome).attainment, 4),
    )


def _busy_ns(spans: Iterable[Span], instance: InstanceId) -> int:
    own = [span for span in spans if span.kind in _BUSY and span.instance == instance]
    return sum((span.stop_ns - span.start_ns) * span.share for span in own) // _WHOLE


def _by_minute(spans: Sequence[Span], gpus: int, ended_ns: int) -> tuple[float, ...]:
    every_ns = _EVERY_S * NS_PER_S
    busy = [0] * -(-ended_ns // every_ns)  # times `_WHOLE`
    for span in spans:
        if span.kind in _BUSY:
            for minute in range(span.start_ns // every_ns, min(span.stop_ns // every_ns + 1, len(busy))):
                begin_ns = minute * every_ns
                inside_ns = min(span.stop_ns, begin_ns + every_ns) - max(span.start_ns, begin_ns)
                busy[minute] += max(inside_ns, 0) * span.share
    return tuple(round(ns / _WHOLE / every_ns / gpus, 4) for ns in busy)
