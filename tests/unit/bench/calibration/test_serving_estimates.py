"""How well the estimators that serve predict runs and switches whose costs are known."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median

import pytest
from msgspec import structs

from aegis.core.estimators import Hardware, Latency
from aegis.core.ids import InstanceId, ModelId
from aegis.core.model import Pooling, Slo
from aegis.sim.shapes import SHAPES
from aegis.telemetry.spans import Span, SpanKind
from bench.calibration.serving_estimates import serving_lines, serving_quality
from bench.calibration.suite import calibrate
from bench.calibration.telemetry import Telemetry
from tests.unit.bench.calibration.made_telemetry import MODELS, Truth, made

SPECS = tuple(SHAPES["qwen2.5-7b"].spec(model, Slo()) for model in MODELS)
STEADY = Truth(decode=(2_000_000, 400, 300_000, 0))
"""What a step of several rows costs besides is no term of eq. 6."""


def switches(model: ModelId, durations_ns: Iterable[int], instance: str = "decode-0") -> list[Span]:
    """Each waits longer than for its load."""
    return [
        Span(InstanceId(instance), SpanKind.SWITCH, model, at * 10**10, at * 10**10 + 2 * took_ns, copy_ns=took_ns)
        for at, took_ns in enumerate(durations_ns, start=1)
    ]


def test_runs_as_the_equations_have_them_are_predicted() -> None:
    """Nearly: the bound of the hardware keeps a small weight in the fits."""
    found = serving_quality(made(STEADY)[0], SPECS)
    assert list(found.models) == sorted(MODELS)
    for each in (*found.models.values(), found.all):
        assert each[SpanKind.DECODE].r2 > 0.9 and each[SpanKind.PREFILL].r2 > 0.95
        assert each[SpanKind.DECODE].typical < 0.1 and each[SpanKind.PREFILL].typical < 0.1


def test_a_run_is_predicted_before_it_is_learned_from() -> None:
    """Steps that take twice as long as before are so in the run after the first of them, at the earliest."""
    instance, model = InstanceId("decode-0"), MODELS[0]
    runs = [
        Span(instance, SpanKind.DECODE, model, at * 10**9, at * 10**9 + (1 if at < 30 else 2) * 10**8, 1, 10, 100)
        for at in range(1, 31)
    ]
    last = serving_quality(runs, SPECS).models[model][SpanKind.DECODE]
    assert last.observations == 20
    assert last.worst == pytest.approx(0.5, abs=0.02)
    assert last.typical < 0.02


def test_a_switch_is_predicted_before_it_is_learned_from() -> None:
    """By the time of its copy, of which alone it is learned. Each copy takes longer than the one before."""
    durations_ns = [round(10**9 * 1.05**number) for number in range(20)]
    latency, before, after = Latency(SPECS[0].manifest, Hardware()), list[float](), list[float]()
    expected_ns = []
    for took_ns in durations_ns:
        expected_ns.append(latency.switch_ns())
        before.append(abs(latency.switch_ns() / took_ns - 1))
        latency.saw_switch(took_ns)
        after.append(abs(latency.switch_ns() / took_ns - 1))
    found = serving_quality(switches(MODELS[0], durations_ns), SPECS).models[MODELS[0]]
    assert list(found) == [SpanKind.SWITCH]
    assert found[SpanKind.SWITCH].observations == 10
    assert found[SpanKind.SWITCH].typical == pytest.approx(median(before[10:]))
    bias = sum(expected_ns[10:]) / sum(durations_ns[10:]) - 1
    assert found[SpanKind.SWITCH].bias == pytest.approx(bias) and bias < -0.1
    assert median(before[10:]) > 1.02 * median(after[10:])


def test_an_instance_learns_from_its_own_switches_alone() -> None:
    near, far = switches(MODELS[0], [10**9] * 30), switches(MODELS[0], [4 * 10**9] * 30, "decode-1")
    assert serving_quality([*near, *far], SPECS).models[MODELS[0]][SpanKind.SWITCH].worst < 0.02


def test_a_switch_to_a_model_on_its_way_teaches_nothing() -> None:
    prefetched = [structs.replace(span, copy_ns=0) for span in switches(MODELS[0], [10**9] * 30)]
    assert not serving_quality(prefetched, SPECS).models


def test_r2_of_all_switches_tells_how_well_models_are_told_apart() -> None:
    spans = [*switches(MODELS[0], [10**9] * 30), *switches(MODELS[1], [4 * 10**9] * 30)]
    found = serving_quality(spans, SPECS)
    assert found.all[SpanKind.SWITCH].observations == 40
    assert found.all[SpanKind.SWITCH].r2 > 0.99
    assert all(each[SpanKind.SWITCH].r2 <= 0.0 for each in found.models.values())


def test_a_model_has_scores_of_what_it_did_alone() -> None:
    spans = [span for span in made(STEADY)[0] if span.model == MODELS[0] or span.kind is SpanKind.PREFILL]
    assert {model: list(each) for model, each in serving_quality(spans, SPECS).models.items()} == {
        MODELS[0]: [SpanKind.PREFILL, SpanKind.DECODE],
        MODELS[1]: [SpanKind.PREFILL],
    }


def test_a_line_tells_each_kind_of_each_model_and_of_all() -> None:
    spans = [*made(STEADY)[0], *switches(MODELS[0], [10**9] * 30)]
    head, *lines = serving_lines(serving_quality(spans, SPECS))
    assert head.split()[-5:] == ["seen", "R2", "typical", "in", "all"]
    assert [line.split()[:2] for line in lines] == [
        [name, kind]
        for name in ("a", "b", "all")
        for kind in ("prefill", "decode", "switch")
        if (name, kind) != ("b", "switch")
    ]
    assert not list(serving_lines(serving_quality([], SPECS)))[1:]


def test_calibration_tells_of_both_where_the_models_are_known(tmp_path: Path) -> None:
    seen = Telemetry(*made(STEADY))
    told = calibrate(seen, tmp_path / "costs.yaml", SPECS)
    assert any("the server's own estimates" in line for line in told.table)
    assert set(told.serving.models) == set(told.fits)
    unknown = calibrate(seen, tmp_path / "costs.yaml")
    assert not unknown.serving.models
    assert unknown.table == told.table[: len(unknown.table)]


def test_requests_are_asked_for_models_that_are_served_and_generate(tmp_path: Path) -> None:
    seen = Telemetry(*made(STEADY))
    names = ModelId("rare"), ModelId("embedder"), ModelId("gone")
    for name in names:
        seen.spans.append(Span(InstanceId("decode-0"), SpanKind.PREFILL, name, 0, 10**8, 1, 1, 100))
    rare, embedder = (SHAPES["qwen2.5-7b"].spec(name, Slo()) for name in names[:2])
    pooling = structs.replace(embedder.manifest, pooling=Pooling(8))
    served = (*SPECS, rare, structs.replace(embedder, manifest=pooling))
    told = calibrate(seen, tmp_path / "costs.yaml", served).table[-1]
    assert told == "too few runs, so not in the file: rare; send more requests to them"
