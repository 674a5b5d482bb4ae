"""`aegis calibrate`: from what a server did to a cost file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aegis.admin_client import AdminClient
from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from aegis.telemetry.spans import SpanKind
from bench.calibration import cost_file, past
from bench.calibration.past import Past
from bench.calibration.probe import probed
from bench.calibration.rates import measure_rates
from bench.calibration.steps import StepFit, fit_steps
from bench.calibration.table import lines
from bench.common.result_files import check, write


def run(*, url: str, probe: bool, seconds: float | None, spans: Path | None, records: Path | None, out: Path) -> None:
    """Prints what was measured and writes it. Raises UserError."""
    check(out)
    if probe and (seconds is not None or spans is not None):
        raise UserError("--probe says itself what is learnt from; leave out --seconds and --spans")
    if records is not None and spans is None:
        raise UserError("--records is a file beside one of --spans; a server is asked for its own")
    print(*calibrate(_seen(url, probe, seconds, spans, records), out).table, sep="\n")


@dataclass(frozen=True, slots=True)
class Learned:
    """`table` is for people."""

    fits: Mapping[ModelId, StepFit]
    table: list[str]


def calibrate(seen: Past, out: Path) -> Learned:
    """Writes what was measured. Raises UserError where there is too little to learn from."""
    contention, fits = fit_steps(seen.spans)
    if not fits:
        raise UserError("too few runs of any model to learn from: at least 10 prefills and 10 decode runs are needed")
    rates = measure_rates(seen.spans, seen.records)
    write(out, cost_file.written(contention, fits, rates).encode())
    seen_models = {span.model for span in seen.spans if span.kind in (SpanKind.DECODE, SpanKind.PREFILL)}
    left_out = sorted(seen_models - fits.keys())
    return Learned(fits, [*lines(contention, fits, rates), *_left_out(left_out)])


def _left_out(models: Sequence[ModelId]) -> list[str]:
    """What a simulation would miss in the file."""
    return [f"too few runs, so not in the file: {', '.join(models)}; send more requests to them"] if models else []


def _seen(url: str, probe: bool, seconds: float | None, spans: Path | None, records: Path | None) -> Past:
    if probe:
        return probed(url)
    if spans is not None:
        return past.kept(spans, records)
    client = AdminClient(url)
    return past.since(client) if seconds is None else past.watch(client, seconds)
