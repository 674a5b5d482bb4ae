"""The cost file: what `aegis simulate --costs` reads (aegis/sim/gpu_costs.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from aegis.core.ids import ModelId
from bench.calibration.rates import Rates
from bench.calibration.steps import StepFit

_HEAD = (
    "# Measured by `aegis calibrate`, for `aegis simulate --costs`. Bytes per second; milliseconds, of costs per step\n"
    "# or prompt, per 1 000 tokens, per row of a batch, per step of more than one row, per 1 000 000 squared tokens.\n"
)


def written(contention: float, fits: Mapping[ModelId, StepFit], rates: Rates) -> str:
    """As YAML. What was not seen is left out."""
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
    content["costs"] = {str(model): _costs(fit) for model, fit in fits.items()}
    return _HEAD + yaml.safe_dump(content, sort_keys=False, default_flow_style=None)


def _costs(fit: StepFit) -> dict[str, dict[str, float]]:
    (step, token, row, batch), (prompt, linear, square) = fit.decode, fit.prefill
    return {
        "decode_ms": {"step": max(_ms(step), 0.001), "ktoken": _ms(1e3 * token), "row": _ms(row), "batch": _ms(batch)},
        "prefill_ms": {"step": _ms(prompt), "ktoken": _ms(1e3 * linear), "ktoken2": _ms(1e6 * square)},
    }


def _ms(ns: float) -> float:
    return round(float(ns) / 1e6, 6)
