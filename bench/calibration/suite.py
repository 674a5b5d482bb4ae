"""`aegis calibrate`: from what a server did to a cost file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from aegis.admin_client import AdminClient
from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.sim.compute_shares import WHOLE
from aegis.telemetry.node_report import NodeReport
from aegis.telemetry.spans import Span, SpanKind
from bench.calibration import telemetry
from bench.calibration.lane_shares import LaneShares, fit_lanes
from bench.calibration.least_squares import Quality
from bench.calibration.rates import CopyRate, Rates, measure_rates
from bench.calibration.serving_estimates import ServingQuality, serving_lines, serving_quality
from bench.calibration.steps import FEWEST, StepFit, fit_steps, observed
from bench.calibration.telemetry import Telemetry
from bench.common.result_files import check, write
from bench.serve import suite
from bench.serve.settings import Settings
from bench.workloads.grid import Grid

GOOD_R2 = 0.95
_NEAR = 0.02  # a fit so near to what can be reached leaves nothing to explain


def lines(contention: float, fits: Mapping[ModelId, StepFit], rates: Rates) -> Iterator[str]:
    """One line for each model and kind of step, then the rest. Errors are of runs that no fit has seen; `at best` is
    the R² that no function exceeds, for runs that are alike differ."""
    width = max([5, *map(len, fits)])
    yield f"{'model':{width}} {'':7} {'constant':>10} {'1 000 tok':>10} {'row, tok2':>10} {'rows > 1':>10} " + (
        f"{'runs':>6} {'R2':>6} {'at best':>8} {'typical':>8} {'worst':>8}"
    )
    for model, fit in fits.items():
        step, token, row, batch = fit.decode
        yield _line(f"{model:{width}} decode ", (step, 1e3 * token, row, batch), fit.decode_quality)
        prompt, linear, square = fit.prefill
        yield _line(f"{model:{width}} prefill", (prompt, 1e3 * linear, 1e6 * square), fit.prefill_quality)
    yield ""
    yield from _rest(contention, rates)
    yield from _poor(fits)


def lane_lines(lanes: LaneShares | None) -> Iterator[str]:
    """What half of the device is worth; nothing where it was not divided."""
    if lanes:
        half = WHOLE // 2
        decode, prefill = lanes.shares.decode_slowness(half), lanes.shares.prefill_slowness(half)
        yield (
            f"{'on half of a device':30} decode {WHOLE / decode:.0%}, prefill {WHOLE / prefill:.0%} of the speed; "
            f"{lanes.decodes} and {lanes.prefills} runs on shares, typical error {lanes.typical:.1%}"
        )


def _poor(fits: Mapping[ModelId, StepFit]) -> Iterator[str]:
    """Advice for fits that explain little."""
    poor = {
        model: [judged for judged in (fit.decode_quality, fit.prefill_quality) if judged.r2 < GOOD_R2]
        for model, fit in fits.items()
    }
    noisy = [model for model, kinds in poor.items() if kinds and all(map(_at_ceiling, kinds))]
    unlike = [model for model, kinds in poor.items() if kinds and model not in noisy]
    if unlike:
        yield f"R2 below {GOOD_R2}: {', '.join(unlike)}; docs/calibrate.md says what may be done about it"
    if noisy:
        yield f"R2 below {GOOD_R2} and as good as noise allows: {', '.join(noisy)}; calibrate when the machine is quiet"


def _at_ceiling(judged: Quality) -> bool:
    return judged.ceiling is not None and judged.r2 >= judged.ceiling - _NEAR


def _line(head: str, costs_ns: Sequence[float], judged: Quality) -> str:
    best = "" if judged.ceiling is None else f"{judged.ceiling:.3f}"
    costs = " ".join(f"{cost_ns / 1e6:10.4f}" for cost_ns in costs_ns)
    return (
        f"{head} {costs:43} {judged.observations:6} "
        f"{judged.r2:6.3f} {best:>8} {judged.typical:8.1%} {judged.worst:8.0%}"
    )


def _rest(contention: float, rates: Rates) -> Iterator[str]:
    for name, rate in (("host to device", rates.to_device), ("device to host", rates.to_host)):
        yield f"{name:30} {_rate(rate) if rate else 'not seen'}"
    if rates.beta is not None:
        yield f"{'beta of eq. 4':30} {rates.beta:.2f}"
    yield f"{'between two runs':30} {rates.run_ns / 1e3:.0f} us"
    yield f"{'more where the model changes':30} {rates.switch_ns / 1e3:.0f} us"
    message = "not seen" if rates.message_ns is None else f"{rates.message_ns / 1e3:.0f} us"
    yield f"{'a message':30} {message}"
    yield f"{'longer for each run beside it':30} {contention:.0%}"


def _rate(rate: CopyRate) -> str:
    return f"{rate.bytes_per_s / 1e9:.2f} GB/s and {rate.overhead_ns / 1e3:.0f} us a copy (R2 {rate.quality.r2:.3f})"


def probed(url: str) -> Telemetry:
    """The spans and records of a grid of requests to each of the server's models. Raises UserError."""
    client = AdminClient(url)
    start = telemetry.position(client)
    suite.run(Settings(base_url=url, api_key=client.key, workload=grid_for(client.node()), map="round-robin"))
    return telemetry.settled(client, start)


def grid_for(node: NodeReport) -> str:
    """The workload: of as many models as there are, with prompts that all of them take. Raises UserError."""
    if not node.models:
        raise UserError("the server has no models to probe")
    usual, shortest = Grid(), min(spec.manifest.context_tokens for spec in node.models)
    answer = min(usual.answer, max(shortest // 2, 1))
    return f"grid:models={len(node.models)},prompt={max(min(usual.prompt, shortest - answer), 1)},answer={answer}"


_MEDIAN_OF_NORMAL = 0.6745  # of how far draws are from the mean, in standard deviations
_HEAD = (
    "# Measured by `aegis calibrate`, for `aegis simulate --costs`. Bytes per second; milliseconds, of costs per step\n"
    "# or prompt, per 1 000 tokens, per row of a batch, per step of more than one row, per 1 000 000 squared tokens;\n"
    "# noise as a share of what a run takes.\n"
)


def written(contention: float, fits: Mapping[ModelId, StepFit], rates: Rates, lanes: LaneShares | None = None) -> str:
    """What was learnt, as YAML. What was not seen is left out."""
    content: dict[str, Any] = {}
    if rates.to_device:
        content |= {"link_in": round(rates.to_device.bytes_per_s), "copy_ms": _ms(rates.to_device.overhead_ns)}
    if rates.to_host:
        content["link_out"] = round(rates.to_host.bytes_per_s)
    if rates.beta is not None:
        content["beta"] = round(rates.beta, 3)
    content |= {"run_ms": _ms(rates.run_ns), "switch_ms": _ms(rates.switch_ns)}
    if rates.message_ns is not None:
        content["handover_ms"] = _ms(2 * rates.message_ns)
    content["contention"] = round(contention, 3)
    if noise := _noise(fits.values()):
        content["noise"] = noise
    if lanes:
        known = lanes.shares
        content["lanes"] = {
            "units": known.units,
            "step": known.step_units,
            "decode_bend": known.decode_bend,
            "prefill_bend": known.prefill_bend,
        }
    content["costs"] = {str(model): _costs(fit) for model, fit in fits.items()}
    return _HEAD + yaml.safe_dump(content, sort_keys=False, default_flow_style=None)


def _noise(fits: Iterable[StepFit]) -> float | None:
    """The standard deviation of runs about their costs, as a share; None if too few were seen. It is that of a normal
    distribution with the median of the errors, so hiccups do not count."""
    of = [quality for fit in fits for quality in (fit.decode_quality, fit.prefill_quality) if quality.observations]
    runs = sum(quality.observations for quality in of)
    typical = sum(quality.observations * quality.typical for quality in of)
    return round(typical / runs / _MEDIAN_OF_NORMAL, 3) if runs else None


def _costs(fit: StepFit) -> dict[str, dict[str, float]]:
    (step, token, row, batch), (prompt, linear, square) = fit.decode, fit.prefill
    return {
        "decode_ms": {"step": max(_ms(step), 0.001), "ktoken": _ms(1e3 * token), "row": _ms(row), "batch": _ms(batch)},
        "prefill_ms": {"step": _ms(prompt), "ktoken": _ms(1e3 * linear), "ktoken2": _ms(1e6 * square)},
    }


def _ms(ns: float) -> float:
    return round(float(ns) / 1e6, 6)


def run(*, url: str, probe: bool, seconds: float | None, spans: Path | None, records: Path | None, out: Path) -> None:
    """Prints what was measured and writes it. Raises UserError."""
    check(out)
    if probe and (seconds is not None or spans is not None):
        raise UserError("--probe sends requests of its own to learn from; leave out --seconds and --spans")
    if records is not None and spans is None:
        raise UserError("--records is a file beside one of --spans; a server is asked for its own")
    if seconds is not None and spans is not None:
        raise UserError("--seconds is for a server, which is watched; --spans is of one that was")
    seen = _seen(url, probe, seconds, spans, records)
    models = AdminClient(url).node().models if spans is None else ()
    print(*calibrate(seen, out, models).table, sep="\n")


@dataclass(frozen=True, slots=True)
class Learned:
    """`table` is for people. `serving` is how well the server's own estimators predict the same runs; of no
    model where nobody knows their shapes."""

    fits: Mapping[ModelId, StepFit]
    serving: ServingQuality
    table: list[str]


def calibrate(seen: Telemetry, out: Path, models: Sequence[ModelSpec] = ()) -> Learned:
    """Writes what was measured. `models` are those of the server. Raises UserError if there is too little to learn
    from."""
    contention, fits = fit_steps(seen.spans)
    if not fits:
        raise _too_few(seen.spans)
    rates = measure_rates(seen.spans, seen.records)
    lanes = fit_lanes(seen.spans, fits, contention)
    write(out, written(contention, fits, rates, lanes).encode())
    seen_models = {span.model for span in seen.spans if span.kind in (SpanKind.DECODE, SpanKind.PREFILL)}
    served = {spec.model for spec in models if spec.manifest.pooling is None}
    left_out = sorted((seen_models & served if models else seen_models) - fits.keys())
    serving = serving_quality(seen.spans, models)
    own = ["", *serving_lines(serving)] if serving.models else []
    return Learned(fits, serving, [*lines(contention, fits, rates), *lane_lines(lanes), *own, *_left_out(left_out)])


def _too_few(spans: Sequence[Span]) -> UserError:
    """The refusal where every model had too few runs."""
    counts = observed(spans)
    most = max(counts, key=lambda model: min(counts[model]), default=None)
    had = "none had any" if most is None else f"{most} had {counts[most][0]} and {counts[most][1]}"
    return UserError(
        f"too few runs to learn from: a model needs {FEWEST} prefills and {FEWEST} decode runs, and {had}; watch the "
        "server for longer, under load, or let `aegis calibrate --probe` send it some"
    )


def _left_out(models: Sequence[ModelId]) -> list[str]:
    """The parts that a simulation would miss in the file."""
    return [f"too few runs, so not in the file: {', '.join(models)}; send more requests to them"] if models else []


def _seen(url: str, probe: bool, seconds: float | None, spans: Path | None, records: Path | None) -> Telemetry:
    if probe:
        return probed(url)
    if spans is not None:
        return telemetry.from_files(spans, records)
    client = AdminClient(url)
    return telemetry.since(client) if seconds is None else telemetry.watch(client, seconds)
