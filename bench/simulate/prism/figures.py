"""What Prism's evaluation measures of a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from msgspec import Struct

from aegis.core.clock import NS_PER_S
from aegis.core.ids import InstanceId, ModelId
from aegis.core.model import Slo
from aegis.sim.simulation import Outcome
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span, SpanKind
from bench.common.percentiles import percentile
from bench.simulate.prism.slos import tpot_ns
from bench.simulate.setting import Setting, run

_BUSY = (SpanKind.PREFILL, SpanKind.DECODE)
_BALANCE_S = 30
_TIMELINE_S = 5


class ShareFigures(Struct, frozen=True, omit_defaults=True):
    """`ttft` and `tpot` are the shares of requests whose first token came in time, and whose others kept the pace on
    average; a request that failed did neither. The first request of each model counts in neither: it finds nothing
    loaded, as on no server that has been there before. `imbalance`: by how much of its time the busiest device computed
    more than the idlest one, on average over 30 s each."""

    requests: int
    failed: int
    ttft: float
    tpot: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    switches: int
    moves: int
    imbalance: float


class Timeline(Struct, frozen=True):
    """Every 5 s: requests that came, tokens made per second, and thousand tokens of KV of requests that have a first
    token and are not over; of each model in order of name, then of all."""

    every_s: int
    came: tuple[tuple[int, ...], ...]
    tokens_per_s: tuple[float, ...]
    kv_ktokens: tuple[float, ...]


def measured(setting: Setting) -> ShareFigures:
    """Raises UserError."""
    return share_figures(run(setting), dict(setting.slos))


def share_figures(outcome: Outcome, slos: Mapping[ModelId, Slo]) -> ShareFigures:
    records = outcome.records
    waits = sorted(r.first_ns - r.arrival_ns for r in records if r.first_ns is not None)
    began = {record.model: record.request for record in sorted(records, key=_came, reverse=True)}
    later = [record for record in records if record.request != began[record.model]]
    return ShareFigures(
        requests=len(records),
        failed=sum(record.ended != "finished" for record in records),
        ttft=round(_share(_first_in_time(record, slos[record.model]) for record in later), 5),
        tpot=round(_share(_keeps_pace(record, slos[record.model]) for record in later), 5),
        tokens_per_s=round(
            sum(record.output_tokens for record in records if record.ended == "finished")
            * NS_PER_S
            / max(outcome.ended_ns, 1),
            1,
        ),
        ttft_p50_ms=round((percentile(waits, 50) or 0) / 1e6, 1),
        ttft_p99_ms=round((percentile(waits, 99) or 0) / 1e6, 1),
        switches=len(outcome.switches),
        moves=len(outcome.moves),
        imbalance=round(_imbalance(outcome.spans, list(outcome.counters)), 4),
    )


def timeline(setting: Setting) -> Timeline:
    """Raises UserError."""
    outcome = run(setting, keep_times=True)
    records, bins = outcome.records, range(outcome.ended_ns // (_TIMELINE_S * NS_PER_S) + 1)
    models = sorted({record.model for record in records})
    came = [[0] * len(bins) for _ in models]
    made, held = [0] * len(bins), [0] * len(bins)
    for record in records:
        came[models.index(record.model)][_bin(record.arrival_ns)] += 1
        for time_ns in record.token_times_ns:
            made[_bin(time_ns)] += 1
        for at in bins:
            held[at] += _held(record, at * _TIMELINE_S * NS_PER_S)
    return Timeline(
        _TIMELINE_S,
        tuple(tuple(each) for each in came),
        tuple(tokens / _TIMELINE_S for tokens in made),
        tuple(tokens / 1000 for tokens in held),
    )


def _came(record: Record) -> tuple[int, int]:
    return record.arrival_ns, record.request


def _bin(time_ns: int) -> int:
    return time_ns // (_TIMELINE_S * NS_PER_S)


def _held(record: Record, at_ns: int) -> int:
    """The tokens of its KV."""
    times = record.token_times_ns
    if not times or not times[0] <= at_ns < times[-1]:
        return 0
    return record.input_tokens + sum(time_ns <= at_ns for time_ns in times)


def _share(held: Iterable[bool]) -> float:
    told = list(held)
    return sum(told) / len(told) if told else 1.0


def _first_in_time(record: Record, slo: Slo) -> bool:
    return record.first_ns is not None and record.first_ns - record.arrival_ns <= slo.ttft_ns


def _keeps_pace(record: Record, slo: Slo) -> bool:
    if record.ended != "finished":
        return False
    pace_ns = tpot_ns(record)
    return pace_ns is None or pace_ns <= slo.tbt_ns


def _imbalance(spans: Iterable[Span], instances: list[InstanceId]) -> float:
    every_us = _BALANCE_S * 1_000_000
    busy: dict[int, dict[InstanceId, int]] = {}
    for span in spans:
        if span.kind in _BUSY:
            start_us, stop_us = span.start_ns // 1000, span.stop_ns // 1000
            edges = [start_us, *range((start_us // every_us + 1) * every_us, stop_us, every_us), stop_us]
            for low, high in pairwise(edges):
                of = busy.setdefault(low // every_us, {})
                of[span.instance] = of.get(span.instance, 0) + high - low
    if not busy or len(instances) < 2:
        return 0.0
    spread = [max(of.values()) - min([of.get(instance, 0) for instance in instances]) for of in busy.values()]
    return sum(spread) / len(spread) / every_us
