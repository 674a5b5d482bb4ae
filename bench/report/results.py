"""The figures of a run, by whatever says them: its result, else its records and spans."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from aegis.telemetry.records import REFUSED
from aegis.telemetry.spans import SpanKind
from bench.common.percentiles import percentile
from bench.report.run import Run, Served, Sweep
from bench.report.usage import COMPUTE, instances
from bench.simulate.figures import Figures

Values = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class Metric:
    """`unit` is how a value is shown: number, s, or share. `more` is whether more of it is better; None: neither."""

    name: str
    title: str
    unit: str
    more: bool | None


METRICS = (
    Metric("requests", "requests", "number", None),
    Metric("failed", "failed requests", "number", False),
    Metric("attainment", "tokens on time", "share", True),
    Metric("goodput", "tokens on time per second", "number", True),
    Metric("ttft_p50", "TTFT, median", "s", False),
    Metric("ttft_p99", "TTFT, p99", "s", False),
    Metric("tbt_p99", "time between tokens, p99", "s", False),
    Metric("switches", "switches", "number", None),
    Metric("utilisation", "time computing", "share", None),
    Metric("duration", "duration", "s", None),
)


def rows(runs: tuple[Run, ...], sweeps: tuple[Sweep, ...]) -> dict[str, Values]:
    """What is known of each run, and of each simulation that swept nothing, by name."""
    found: dict[str, Values] = {}
    for sweep in sweeps:
        if sweep.key is None:
            for curve in [each for each in sweep.curves if each.points]:
                name = sweep.name if len(sweep.curves) == 1 else f"{sweep.name}: {curve.policy}"
                found[name] = of_simulation(curve.points[0].figures)
    for run in runs:
        told = {name: value for name, value in of_run(run).items() if value is not None}
        found[run.name] = {**told, **found.get(run.name, {})}
    return found


def of_simulation(figures: Figures) -> Values:
    return {
        "requests": figures.requests,
        "failed": figures.failed,
        "attainment": figures.attainment,
        "goodput": figures.goodput_tokens_per_s,
        "ttft_p50": _seconds(figures.ttft_p50_ms),
        "ttft_p99": _seconds(figures.ttft_p99_ms),
        "tbt_p99": _seconds(figures.tbt_p99_ms),
        "switches": figures.switches,
        "utilisation": figures.utilisation,
        "duration": figures.duration_s,
    }


def of_run(run: Run) -> Values:
    values = _of_records(run) | _of_spans(run)
    return values | (_of_result(run.result) if run.result else {})


def _of_result(result: Served) -> Values:
    met = result.slo_tokens_met
    values: Values = {
        "requests": result.completed + result.failed,
        "failed": result.failed,
        "attainment": result.slo_attainment,
        "goodput": met / result.duration if met is not None and result.duration else None,
        "ttft_p50": _seconds(result.median_ttft_ms),
        "ttft_p99": _seconds(result.p99_ttft_ms),
        "tbt_p99": _seconds(result.p99_itl_ms),
        "duration": result.duration,
    }
    return {name: value for name, value in values.items() if value is not None}


def _of_records(run: Run) -> Values:
    records = run.records
    if not records:
        return {}
    asked, met = sum(record.output_tokens for record in records), sum(record.on_time for record in records)
    first_ns = sorted(record.first_ns - record.arrival_ns for record in records if record.first_ns is not None)
    gaps_ns = sorted(after - before for record in records for before, after in pairwise(record.token_times_ns))
    last_ns = max((record.last_ns for record in records if record.last_ns is not None), default=0)
    duration_s = (last_ns - min(record.arrival_ns for record in records)) / 1e9
    return {
        "requests": len(records),
        "failed": sum(record.ended in ("failed", REFUSED) for record in records),
        "attainment": met / asked if asked else 1.0,
        "goodput": met / duration_s if duration_s > 0 else None,
        "ttft_p50": _of_ns(percentile(first_ns, 50)),
        "ttft_p99": _of_ns(percentile(first_ns, 99)),
        "tbt_p99": _of_ns(percentile(gaps_ns, 99)),
        "duration": max(duration_s, 0.0),
    }


def _of_spans(run: Run) -> Values:
    if not run.spans:
        return {}
    busy_ns = sum(span.device_ns for span in run.spans if span.kind in COMPUTE)
    whole_ns = (run.stop_ns - run.start_ns) * len(instances(run.spans))
    return {
        "switches": sum(span.kind is SpanKind.SWITCH for span in run.spans),
        "utilisation": busy_ns / whole_ns if whole_ns else None,
    }


def _seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1e3


def _of_ns(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e9
