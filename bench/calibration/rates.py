"""The costs of copies, switches, messages and the time between runs, from spans and records."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean, median

import numpy as np

from aegis.core.ids import InstanceId, ModelId
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span, SpanKind
from bench.calibration.least_squares import Quality, fit, quality, usual_mean

_TO_DEVICE = (SpanKind.LOAD, SpanKind.PREFETCH, SpanKind.SWAP_IN)
_IDLE_NS = 10_000_000  # an instance that does nothing for so long has no work
_WAITED_NS = 100_000  # a switch that takes longer waits for memory or a copy
_FEWEST = 10


@dataclass(frozen=True, slots=True)
class CopyRate:
    """A copy of n bytes takes `overhead_ns + n / bytes_per_s`."""

    bytes_per_s: float
    overhead_ns: float
    quality: Quality


@dataclass(frozen=True, slots=True)
class Rates:
    """None: not seen. `beta` is that of eq. 4: what a switch that had to wait for its weights took, as a multiple of
    bytes over bandwidth. `message_ns` is one way between the proxy and an instance."""

    to_device: CopyRate | None
    to_host: CopyRate | None
    beta: float | None
    run_ns: float
    switch_ns: float
    message_ns: float | None


def measure_rates(spans: Sequence[Span], records: Sequence[Record]) -> Rates:
    to_device = _copy_rate(span for span in spans if span.kind in _TO_DEVICE)
    run_ns, switch_ns = _between_runs(spans, _Alive(records))
    return Rates(
        to_device,
        _copy_rate(span for span in spans if span.kind is SpanKind.SWAP_OUT),
        _beta(spans, to_device),
        run_ns,
        switch_ns,
        _message_ns(spans, records, run_ns, switch_ns),
    )


def _copy_rate(copies: Iterable[Span]) -> CopyRate | None:
    """The rate of the copies; of those that had no other beside them, where there are enough."""
    ordered = sorted((span for span in copies if span.nbytes), key=lambda span: span.start_ns)
    alone = _alone(ordered)
    chosen = alone if len(alone) >= _FEWEST else ordered
    seen = [(span.nbytes, span.stop_ns - span.start_ns) for span in chosen]
    if len(seen) < _FEWEST:
        return None
    features = np.array([(1, nbytes) for nbytes, _ in seen], dtype=np.float64)
    durations = np.maximum(np.array([duration_ns for _, duration_ns in seen], dtype=np.float64), 1.0)
    overhead_ns, ns_per_byte = fit(features, durations)
    if ns_per_byte <= 0:  # all of one size
        overhead_ns, ns_per_byte = 0.0, float(durations.sum() / features[:, 1].sum())
    return CopyRate(1e9 / float(ns_per_byte), float(overhead_ns), quality(features, durations))


def _alone(ordered: Sequence[Span]) -> list[Span]:
    ended = [0, *accumulate((span.stop_ns for span in ordered), max)]
    follow = [*(span.start_ns for span in ordered[1:]), ended[-1]]
    return [
        span
        for span, before_ns, next_ns in zip(ordered, ended, follow, strict=False)
        if before_ns <= span.start_ns and span.stop_ns <= next_ns
    ]


def _between_runs(spans: Sequence[Span], alive: _Alive) -> tuple[float, float]:
    """The time between two decode runs of an instance that has work, and the additional time if the model changes."""
    same, changed = list[int](), list[int]()
    waited = _Waited(spans)
    for before, after in _neighbours(spans):
        gap_ns = after.start_ns - before.stop_ns
        working = gap_ns < _IDLE_NS and alive.throughout(before.start_ns, after.start_ns)
        if working and not waited.before(after, before.stop_ns):
            (same if before.model == after.model else changed).append(gap_ns)
    run_ns, changed_ns = usual_mean(same), usual_mean(changed)
    if same and changed and changed_ns > run_ns:
        return run_ns, changed_ns - run_ns
    return usual_mean([*same, *changed]), 0.0  # a batch that goes on as it was may be the rarer, and the dearer one


def _neighbours(spans: Sequence[Span]) -> Iterator[tuple[Span, Span]]:
    runs: defaultdict[InstanceId, list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind is SpanKind.DECODE and not span.lane:
            runs[span.instance].append(span)
    for these in runs.values():  # on the first lane one ends before the next begins
        yield from pairwise(sorted(these, key=lambda span: span.start_ns))


class _Alive:
    """The times when some request was being decoded, as far as that is known: without records, always."""

    def __init__(self, records: Iterable[Record]) -> None:
        lives = sorted((r.first_ns, r.last_ns) for r in records if r.first_ns is not None and r.last_ns is not None)
        self._firsts = [first_ns for first_ns, _ in lives]
        self._lasts = list(accumulate((last_ns for _, last_ns in lives), max))

    def throughout(self, start_ns: int, stop_ns: int) -> bool:
        """Whether there was one from before this time until after that."""
        count = bisect_right(self._firsts, start_ns)
        return not self._firsts or (count > 0 and self._lasts[count - 1] >= stop_ns)


class _Waited:
    """Switches that waited for memory or a copy, by instance and model."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._stops: defaultdict[tuple[InstanceId, ModelId], list[int]] = defaultdict(list)
        for span in spans:
            if span.kind is SpanKind.SWITCH and span.stop_ns - span.start_ns > _WAITED_NS:
                self._stops[span.instance, span.model].append(span.stop_ns)

    def before(self, run: Span, since_ns: int) -> bool:
        """Whether the run had to wait for one that ended since then."""
        return any(since_ns <= stop_ns <= run.start_ns for stop_ns in self._stops[run.instance, run.model])


def _beta(spans: Iterable[Span], to_device: CopyRate | None) -> float | None:
    """Beta, from switches whose model was loaded meanwhile."""
    loads: defaultdict[tuple[InstanceId, ModelId], list[Span]] = defaultdict(list)
    switches = []
    for span in spans:
        if span.kind is SpanKind.LOAD:
            loads[span.instance, span.model].append(span)
        elif span.kind is SpanKind.SWITCH:
            switches.append(span)
    factors = [
        (switch.stop_ns - switch.start_ns) / (1e9 * switch.nbytes / to_device.bytes_per_s)
        for switch in switches
        if to_device and any(_within(load, switch) for load in loads[switch.instance, switch.model])
    ]
    return median(factors) if factors else None


def _within(load: Span, switch: Span) -> bool:
    return switch.start_ns <= load.start_ns and load.stop_ns <= switch.stop_ns


def _message_ns(spans: Sequence[Span], records: Iterable[Record], run_ns: float, switch_ns: float) -> float | None:
    """Mean of the way to an idle prefill instance, what lies before its run left out, and of the first token's back. Of
    the ways there the median: they are few under load, and some of them waited for what spans do not show."""
    waiting = _Prefills(spans)
    there, back, waited = list[float](), list[float](), _Waited(spans)
    for record in sorted(records, key=lambda record: record.arrival_ns):
        run = waiting.of(record)
        if run is None or record.first_ns is None:
            continue
        back.append(record.first_ns - run.stop_ns)
        before = waiting.before[run]
        if (before is None or before.stop_ns < record.arrival_ns) and not waited.before(run, record.arrival_ns):
            changed = before is None or before.model != run.model
            there.append(run.start_ns - record.arrival_ns - run_ns - (switch_ns if changed else 0))
    if len(back) < _FEWEST:
        return None
    return fmean([*([max(median(there), 0.0)] if there else []), usual_mean(back)])


class _Prefills:
    """The run of each request; `before` is the run that its instance made before."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self.before: dict[Span, Span | None] = {}
        self._runs: defaultdict[tuple[ModelId, int], list[Span]] = defaultdict(list)
        last: dict[InstanceId, Span] = {}
        for run in sorted((s for s in spans if s.kind is SpanKind.PREFILL), key=lambda s: s.start_ns):
            if run.steps and not run.cached and not run.pieces:  # a whole one
                self._runs[run.model, run.tokens].append(run)
            self.before[run] = last.get(run.instance)
            last[run.instance] = run

    def of(self, record: Record) -> Span | None:
        """The first run of the request; None if it is not known. To be asked for in order of arrival."""
        if record.first_ns is None:
            return None
        runs = self._runs[record.model, record.input_tokens]
        found = next((run for run in runs if run.start_ns >= record.arrival_ns), None)
        if found is None or found.stop_ns > record.first_ns:
            return None
        runs.remove(found)
        return found
