"""What shares of a device are worth, from the runs on its lanes: the `lanes` of a costs file.

A run on a share takes longer than alone on the whole device, by the share's curve (`aegis.sim.compute_shares`) and by
what the other lane's run costs it. Both lanes are busy whenever a device is divided, so that the two cannot be told
apart: the curve has all of it, and nothing is left for the bandwidth that a prefill takes. What runs of other instances
cost is told apart: it is in the file as `contention`.

Where lanes share the time of the same cores, the curve says what they did with as many idle cores as there were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np

from aegis.core.ids import ModelId
from aegis.sim.compute_shares import WHOLE, ComputeShares
from aegis.telemetry.spans import Span, SpanKind
from bench.calibration.steps import Beside, StepFit, expected_ns

_FEWEST = 10  # runs of either kind
_BENDS = [float(10 ** (at / 20)) for at in range(-40, 41)]  # from all of the speed on any share to the share itself


@dataclass(frozen=True, slots=True)
class LaneShares:
    """`shares` are as the simulator takes them; a run differs from what they say by the `typical` part of its time."""

    shares: ComputeShares
    decodes: int
    prefills: int
    typical: float


def fit_lanes(spans: Sequence[Span], fits: Mapping[ModelId, StepFit], contention: float = 0.0) -> LaneShares | None:
    """None where too few runs were on a share of a device. The least share that a decode had is the step in which
    shares are given."""
    beside = Beside(spans, contention)
    decodes, prefills = (_runs(spans, kind, fits, beside) for kind in (SpanKind.DECODE, SpanKind.PREFILL))
    if min(len(decodes), len(prefills)) < _FEWEST:
        return None
    decode_bend, prefill_bend = _bend(decodes), _bend(prefills)
    step = min(min(share, WHOLE - share) for share, _, _ in decodes)
    shares = ComputeShares(
        units=WHOLE, step_units=step, prefill_traffic=0.0, decode_bend=decode_bend, prefill_bend=prefill_bend
    )
    errors = [abs(log(slowness / _slowness(share, decode_bend))) for share, slowness, _ in decodes]
    errors += [abs(log(slowness / _slowness(share, prefill_bend))) for share, slowness, _ in prefills]
    return LaneShares(shares, len(decodes), len(prefills), float(np.median(errors)))


def _runs(
    spans: Sequence[Span], kind: SpanKind, fits: Mapping[ModelId, StepFit], beside: Beside
) -> list[tuple[int, float, float]]:
    """The share of each run on a part of its device, how much longer it took than on the whole one, and its weight."""
    found = []
    for span in spans:
        fit = fits.get(span.model)
        if span.kind is not kind or span.on_whole_device or span.streams or fit is None:
            continue
        alone_ns, took_ns = expected_ns(fit, span), (span.stop_ns - span.start_ns) / beside.slower(span)
        if alone_ns > 0 and took_ns > 0:
            found.append((span.share, max(took_ns / alone_ns, 1.0), took_ns))
    return found


def _bend(runs: Sequence[tuple[int, float, float]]) -> float:
    """The bend whose curve is nearest to all runs, by the part of its time that each is off."""
    share, slowness, weight = np.array(runs).T

    def off(bend: float) -> float:
        return float((weight * np.abs(np.log(slowness / _slowness(share, bend)))).sum())

    best: float = min(_BENDS, key=off)
    return round(best, 3)


def _slowness(share: Any, bend: float) -> Any:
    """The curve of `aegis.sim.compute_shares`, of one share or of an array of them."""
    part = share / WHOLE
    return (part + bend) / (part * (1 + bend))
