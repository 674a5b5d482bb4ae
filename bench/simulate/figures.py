"""The result of a simulation, in a handful of figures."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from msgspec import Struct

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.sim.simulation import Outcome
from aegis.telemetry.records import Record
from aegis.telemetry.spans import SpanKind
from bench.common.percentiles import percentile, rank

_BUSY = (SpanKind.PREFILL, SpanKind.DECODE)


class Figures(Struct, frozen=True):
    """Attainment is strict: tokens on time over tokens asked for, so that a request that failed missed all of its own
    that never came. TTFT is of the requests that got a first token; TBT of all gaps between two tokens of a request.
    None: there is none. `utilisation` is the share of the time in which instances computed; a lane counts by its
    share."""

    requests: int
    failed: int
    tokens: int
    attainment: float
    goodput_tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tbt_p99_ms: float | None
    switches: int
    utilisation: float
    duration_s: float


def figures(outcome: Outcome) -> Figures:
    records, ended_ns = outcome.records, max(outcome.ended_ns, 1)
    tokens, on_time = sum(r.output_tokens for r in records), sum(r.on_time for r in records)
    first_ns = sorted(r.first_ns - r.arrival_ns for r in records if r.first_ns is not None)
    busy_ns = sum((span.stop_ns - span.start_ns) * span.share for span in outcome.spans if span.kind in _BUSY) // 1_000
    return Figures(
        requests=len(records),
        failed=sum(r.ended != "finished" for r in records),
        tokens=tokens,
        attainment=on_time / tokens if tokens else 1.0,
        goodput_tokens_per_s=round(on_time * NS_PER_S / ended_ns, 3),
        ttft_p50_ms=_ms(percentile(first_ns, 50)),
        ttft_p99_ms=_ms(percentile(first_ns, 99)),
        tbt_p99_ms=_ms(_tbt_p99_ns(records)),
        switches=len(outcome.switches),
        utilisation=round(busy_ns / (ended_ns * len(outcome.counters)), 6),
        duration_s=ended_ns / NS_PER_S,
    )


def _tbt_p99_ns(records: Iterable[Record]) -> int | None:
    gaps = [np.diff(np.array(r.token_times_ns, dtype=np.int64)) for r in records if len(r.token_times_ns) > 1]
    if not gaps:
        return None
    together = np.concatenate(gaps)
    at = rank(len(together), 99)
    return int(np.partition(together, at)[at])


def _ms(ns: int | None) -> float | None:
    return None if ns is None else round(ns / NS_PER_MS, 3)
