"""What was measured, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from aegis.core.ids import ModelId
from bench.calibration.least_squares import Quality
from bench.calibration.rates import CopyRate, Rates
from bench.calibration.steps import StepFit

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


def _poor(fits: Mapping[ModelId, StepFit]) -> Iterator[str]:
    """What may be done about fits that explain little."""
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
