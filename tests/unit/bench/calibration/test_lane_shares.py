"""What calibration learns of lanes from runs whose slowness is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_fields

from aegis.sim.compute_shares import WHOLE, ComputeShares
from aegis.sim.gpu_costs import gpu, with_costs
from aegis.telemetry.spans import Span, SpanKind
from bench.calibration.lane_shares import fit_lanes
from bench.calibration.steps import fit_steps
from bench.calibration.suite import calibrate
from bench.calibration.telemetry import Telemetry
from tests.long_forms import first_of
from tests.unit.bench.calibration.made_telemetry import Truth, made

KNOWN = ComputeShares(units=1000, step_units=250, prefill_traffic=0.0, decode_bend=0.1, prefill_bend=3.0)


def divided(spans: list[Span], runs: int) -> list[Span]:
    """So many runs of either kind again, on shares of the device and as slow as these make them: a minute apart on
    each lane, and beside each other."""
    again = []
    for kind in (SpanKind.DECODE, SpanKind.PREFILL):
        for at, span in enumerate([span for span in spans if span.kind is kind][:runs]):
            decodes = kind is SpanKind.DECODE
            share = (250, 500, 750)[at % 3]
            slowness = KNOWN.decode_slowness(share) if decodes else KNOWN.prefill_slowness(share)
            start_ns = (1_000 + 60 * at) * 10**9
            stop_ns = start_ns + (span.stop_ns - span.start_ns) * slowness // WHOLE
            span = replace_fields(span, start_ns=start_ns, stop_ns=stop_ns, share=share, lane=at % 2 if decodes else 1)
            again.append(span)
    return again


@pytest.fixture(scope="module")
def whole() -> list[Span]:
    return made(replace(Truth(), noise=0.05))[0]


def test_the_worth_of_shares_is_found(whole: list[Span]) -> None:
    _, fits = fit_steps(whole)
    found = fit_lanes([*whole, *divided(whole, 150)], fits)
    assert found is not None and (found.decodes, found.prefills) == (150, 150)
    for share in (250, 500, 750):
        assert found.shares.decode_slowness(share) == pytest.approx(KNOWN.decode_slowness(share), rel=0.03)
        assert found.shares.prefill_slowness(share) == pytest.approx(KNOWN.prefill_slowness(share), rel=0.03)
    assert found.shares.divisions() == KNOWN.divisions() and found.typical < 0.05


@pytest.mark.parametrize("runs", first_of(1, [0, 9]))
def test_of_few_runs_on_shares_nothing_is_learnt(whole: list[Span], runs: int) -> None:
    _, fits = fit_steps(whole)
    assert fit_lanes([*whole, *divided(whole, runs)], fits) is None


def test_the_simulator_takes_them_from_the_file(whole: list[Span], tmp_path: Path) -> None:
    out = tmp_path / "costs.yaml"
    learned = calibrate(Telemetry([*whole, *divided(whole, 60)], []), out)
    assert any("on half of a device" in line for line in learned.table)
    shares = with_costs(gpu("h100"), out).shares
    assert shares is not None and shares.divisions() == KNOWN.divisions()
    assert shares.decode_slowness(500) == pytest.approx(KNOWN.decode_slowness(500), rel=0.05)
    plain = tmp_path / "plain.yaml"
    assert not any("on half" in line for line in calibrate(Telemetry(whole, []), plain).table)
    assert "lanes" not in plain.read_text()
