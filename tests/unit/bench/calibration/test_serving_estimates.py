"""How well the estimators that serve predict runs whose costs are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from aegis.core.ids import InstanceId
from aegis.core.model import Slo
from aegis.sim.shapes import SHAPES
from aegis.telemetry.spans import Span, SpanKind
from bench.calibration.serving_estimates import serving_quality
from bench.calibration.suite import calibrate
from bench.calibration.telemetry import Telemetry
from tests.unit.bench.calibration.made_telemetry import MODELS, Truth, made

SPECS = tuple(SHAPES["qwen2.5-7b"].spec(model, Slo()) for model in MODELS)
STEADY = Truth(decode=(2_000_000, 400, 300_000, 0))
"""What a step of several rows costs besides is no term of eq. 6."""


def test_runs_as_the_equations_have_them_are_predicted() -> None:
    """Nearly: the bound of the hardware keeps a small weight in the fits."""
    found = serving_quality(made(STEADY)[0], SPECS)
    assert list(found) == sorted(MODELS)
    for each in found.values():
        assert each.decode.r2 > 0.9 and each.prefill.r2 > 0.95
        assert each.decode.typical < 0.1 and each.prefill.typical < 0.1


def test_a_run_is_predicted_before_it_is_learned_from() -> None:
    """Steps that take twice as long as before are so in the run after the first of them, at the earliest."""
    instance, model = InstanceId("decode-0"), MODELS[0]
    prefills = [Span(instance, SpanKind.PREFILL, model, at, at + 9, 1, 1, 100) for at in range(0, 200, 10)]
    runs = [
        Span(instance, SpanKind.DECODE, model, at * 10**9, at * 10**9 + (1 if at < 30 else 2) * 10**8, 1, 10, 100)
        for at in range(1, 31)
    ]
    last = serving_quality([*prefills, *runs], SPECS)[model].decode
    assert last.observations == 20
    assert last.worst == pytest.approx(0.5, abs=0.02)
    assert last.typical < 0.02


def test_a_model_that_nobody_ran_has_no_estimates_to_judge() -> None:
    spans = [span for span in made(STEADY)[0] if span.model == MODELS[0] or span.kind is SpanKind.PREFILL]
    assert list(serving_quality(spans, SPECS)) == [MODELS[0]]


def test_calibration_tells_of_both_where_the_models_are_known(tmp_path: Path) -> None:
    seen = Telemetry(*made(STEADY))
    told = calibrate(seen, tmp_path / "costs.yaml", SPECS)
    assert any("the server's own estimates" in line for line in told.table)
    assert set(told.serving) == set(told.fits)
    unknown = calibrate(seen, tmp_path / "costs.yaml")
    assert not unknown.serving
    assert unknown.table == told.table[: len(unknown.table)]
