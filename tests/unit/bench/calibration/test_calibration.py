"""Costs that made telemetry are found in it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from aegis.core.errors import UserError
from aegis.core.ids import InstanceId, ModelId
from aegis.sim.gpu_costs import gpu, with_costs
from aegis.telemetry.spans import Span, SpanKind
from bench.calibration.rates import measure_rates
from bench.calibration.steps import fit_steps
from bench.calibration.suite import calibrate, run
from bench.calibration.telemetry import Telemetry
from tests.unit.bench.calibration.made_telemetry import DECODE, MODELS, PREFILL, Truth, made


def scaled(costs: tuple[float, ...], by: float) -> tuple[float, ...]:
    return tuple(cost * by for cost in costs)


def test_costs_of_each_model_are_found() -> None:
    truth = Truth()
    contention, fits = fit_steps(made(truth)[0])
    assert contention == 0
    for model, by in zip(MODELS, (1, 2), strict=True):
        assert fits[model].decode == pytest.approx(scaled(truth.decode, by), rel=1e-3)
        assert fits[model].prefill == pytest.approx(scaled(truth.prefill, by), rel=1e-3)
        assert min(fits[model].decode_quality.r2, fits[model].prefill_quality.r2) > 0.999


@pytest.mark.long
def test_noise_and_hiccups_leave_the_costs_what_they_are() -> None:
    truth = Truth(noise=0.2, hiccups=0.01)
    _, fits = fit_steps(made(truth, runs=1500)[0])
    steps, rows, context = 20, 4, 4000
    tokens = context * steps + rows * steps * (steps - 1) / 2
    a, b, c, d = fits[MODELS[0]].decode
    x, y, z, more = truth.decode
    assert (a + d) * steps + b * tokens + c * rows * steps == pytest.approx(
        (x + more) * steps + y * tokens + z * rows * steps, rel=0.1
    )


@pytest.mark.long
def test_where_all_steps_have_several_rows_the_constant_is_of_all_steps() -> None:
    """What is more for several rows cannot be told from it, and is none."""
    truth = Truth()
    step_ns, token_ns, row_ns, more_ns = truth.decode
    _, fits = fit_steps([span for span in made(truth)[0] if span.kind is SpanKind.PREFILL or span.requests > 1])
    assert fits[MODELS[0]].decode == pytest.approx((step_ns + more_ns, token_ns, row_ns, 0), rel=1e-3)


@pytest.mark.long
def test_runs_that_a_batch_has_one_after_the_other_are_one() -> None:
    """However often a scheduler ends them, and whoever runs in between."""
    truth = Truth(noise=0.5)
    whole = [span for span in made(truth)[0] if span.kind is SpanKind.PREFILL or span.steps > 1]
    parts = []
    for span in whole:
        if span.kind is SpanKind.DECODE:
            length_ns, first = span.stop_ns - span.start_ns, span.steps // 2
            middle_ns = span.start_ns + length_ns // 3
            left = span.tokens + first * span.requests
            parts += [
                replace(span, stop_ns=middle_ns, steps=first),
                replace(span, start_ns=middle_ns, steps=span.steps - first, tokens=left),
            ]
        else:
            parts.append(span)
    (_, expected), (_, found) = fit_steps(whole), fit_steps(parts)
    for model in MODELS:
        assert found[model].decode == pytest.approx(expected[model].decode, rel=1e-3)
        assert found[model].decode_quality.observations == expected[model].decode_quality.observations


def test_waiting_for_processors_is_told_from_what_models_cost() -> None:
    """Each run waits, half as long as it runs or three times as long."""
    truth, draws = Truth(), random.Random(1)
    spans = []
    for span in made(truth)[0]:
        waits = draws.choice((0.5, 3.0))
        had_ns = span.stop_ns - span.start_ns
        spans.append(replace(span, stop_ns=span.start_ns + round((1 + waits) * had_ns), processor_ns=had_ns))
    _, fits = fit_steps(spans)
    for model in MODELS:
        assert min(fits[model].decode_quality.r2, fits[model].prefill_quality.r2) > 0.99
    ratio = fits[MODELS[1]].prefill[1] / fits[MODELS[0]].prefill[1]
    assert ratio == pytest.approx(2, rel=0.01)
    assert 1.5 < fits[MODELS[0]].decode[0] / truth.decode[0] < 4


@pytest.mark.long
def test_runs_are_longer_by_what_they_wait_beside_others() -> None:
    """Alone a run has its processor for half of its time, beside another one for a quarter."""
    spans = []
    for number in range(200):
        at_ns, had_ns, beside = number * 10**9, (1 + number % 7) * 10**6, number % 2
        lasts_ns = had_ns * (4 if beside else 2)
        run = Span(DECODE, SpanKind.DECODE, MODELS[0], at_ns, at_ns + lasts_ns, 1, 1 + number % 7, processor_ns=had_ns)
        spans.append(run)
        other_ns = at_ns if beside else at_ns + 5 * 10**8
        other = replace(run, instance=PREFILL, kind=SpanKind.PREFILL, start_ns=other_ns, stop_ns=other_ns + lasts_ns)
        spans.append(replace(other, tokens=had_ns, steps=1))
    contention, fits = fit_steps(spans)
    assert contention == pytest.approx(1, rel=0.01)
    step_ns, _, row_ns, _ = fits[MODELS[0]].decode
    assert step_ns + row_ns == pytest.approx(2e6, rel=0.01)
    assert fits[MODELS[0]].prefill[1] == pytest.approx(2, rel=0.01)


def test_a_model_that_changes_may_cost_less_than_one_that_stays() -> None:
    """It stays where its batch changes."""
    spans, now_ns = list[Span](), 0
    for number in range(90):
        stays = number % 3 == 2
        now_ns += 400_000 if stays else 100_000
        model = spans[-1].model if stays else MODELS[number % 2]
        if spans and not stays and model == spans[-1].model:
            model = MODELS[1 - number % 2]
        spans.append(Span(DECODE, SpanKind.DECODE, model, now_ns, now_ns + 1_000_000, 1, 1, 100))
        now_ns += 1_000_000
    rates = measure_rates(spans, [])
    assert rates.switch_ns == 0
    assert rates.run_ns == pytest.approx(200_000, rel=0.02)  # of all together


def test_what_lies_between_runs_and_what_messages_take_is_found() -> None:
    truth = Truth()
    rates = measure_rates(*made(truth))
    assert rates.run_ns == pytest.approx(truth.run_ns, rel=0.01)
    assert rates.switch_ns == pytest.approx(truth.switch_ns, rel=0.01)
    assert rates.message_ns == pytest.approx(truth.message_ns, rel=0.01)
    assert (rates.to_device, rates.to_host, rates.beta) == (None, None, None)


def test_copies_and_beta_are_found() -> None:
    spans, now_ns = list[Span](), 0
    for number in range(40):
        nbytes = (number + 1) << 20
        for kind, instance, overhead_ns, gbs in (
            (SpanKind.LOAD, DECODE, 20_000, 10),
            (SpanKind.SWAP_OUT, PREFILL, 50_000, 5),
        ):
            stop_ns = now_ns + overhead_ns + nbytes // gbs
            spans.append(Span(instance, kind, MODELS[0], now_ns, stop_ns, nbytes=nbytes))
        load = spans[-2]
        taken_ns = nbytes // 10 * 3
        assert load.stop_ns - load.start_ns < taken_ns
        spans.append(Span(DECODE, SpanKind.SWITCH, MODELS[0], now_ns, now_ns + taken_ns, nbytes=nbytes))
        now_ns += 100_000_000
    rates = measure_rates(spans, [])
    assert rates.to_device and rates.to_host and rates.beta is not None
    assert rates.to_device.bytes_per_s == pytest.approx(10e9, rel=1e-3)
    assert rates.to_device.overhead_ns == pytest.approx(20_000, rel=1e-2)
    assert rates.to_host.bytes_per_s == pytest.approx(5e9, rel=1e-3)
    assert rates.beta == pytest.approx(3, rel=1e-2)


def test_a_switch_that_waited_says_nothing_of_what_lies_between_runs() -> None:
    truth = Truth()
    spans, records = made(truth)
    runs = [span for span in spans if span.kind is SpanKind.DECODE]
    late = [
        Span(
            span.instance,
            span.kind,
            span.model,
            span.start_ns + 5_000_000 * n,
            span.stop_ns + 5_000_000 * n,
            span.requests,
            span.steps,
            span.tokens,
        )
        for n, span in enumerate(runs)
    ]
    waits = [
        Span(span.instance, SpanKind.SWITCH, span.model, span.start_ns - 5_100_000, span.start_ns - 1_000)
        for span in late[1:]
    ]
    assert measure_rates(late, records).run_ns > 5_000_000
    assert measure_rates([*late, *waits], records).run_ns == 0  # nothing is known


def test_the_file_is_what_a_simulation_reads(tmp_path: Path) -> None:
    truth, file = Truth(), tmp_path / "costs.yaml"
    told = calibrate(Telemetry(*made(truth)), file).table
    spec = with_costs(gpu("h100"), file)
    assert spec.run_ns == pytest.approx(truth.run_ns, rel=0.01)
    assert spec.switch_ns == pytest.approx(truth.switch_ns, rel=0.01)
    assert spec.handover_ns == pytest.approx(2 * truth.message_ns, rel=0.01)
    a, b, c, d = truth.decode
    assert spec.fits["a"].decode_ns(1_000, 1) == pytest.approx(a + 1_000 * b + c, rel=0.01)
    assert spec.fits["a"].decode_ns(1_000, 2) == pytest.approx(a + 1_000 * b + 2 * c + d, rel=0.01)
    assert spec.in_bytes_per_s == gpu("h100").in_bytes_per_s  # not seen
    assert any("prefill" in line for line in told)


def test_a_model_with_too_few_runs_is_named(tmp_path: Path) -> None:
    spans, records = made(Truth())
    rare = [replace(span, model=ModelId("rare")) for span in spans if span.kind is SpanKind.PREFILL][:9]
    told = calibrate(Telemetry([*spans, *rare], records), tmp_path / "costs.yaml").table
    assert told[-1] == "too few runs, so not in the file: rare; send more requests to them"
    assert not any("too few" in line for line in calibrate(Telemetry(spans, records), tmp_path / "costs.yaml").table)


def test_records_without_spans_are_not_left_out_in_silence(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    with pytest.raises(UserError, match="--records is a file beside one of --spans"):
        _run(tmp_path, records=file)


def test_a_probe_says_itself_what_is_learnt_from(tmp_path: Path) -> None:
    for other in ({"seconds": 5.0}, {"spans": tmp_path / "spans.jsonl"}):
        with pytest.raises(UserError, match="leave out --seconds and --spans"):
            _run(tmp_path, probe=True, **other)


def test_a_time_to_watch_is_not_passed_over_beside_spans(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--seconds is for a server"):
        _run(tmp_path, seconds=5.0, spans=tmp_path / "spans.jsonl")


def _run(directory: Path, **given: Any) -> None:
    options: dict[str, Any] = {"url": "http://127.0.0.1:9", "probe": False, "seconds": None, "spans": None}
    run(**{**options, "records": None, "out": directory / "costs.yaml", **given})


def test_too_little_to_learn_from_is_told(tmp_path: Path) -> None:
    span = Span(InstanceId("i"), SpanKind.DECODE, ModelId("m"), 0, 5, 1, 1, 1)
    with pytest.raises(UserError) as refusal:
        calibrate(Telemetry([span] * 9, []), tmp_path / "costs.yaml")
    assert refusal.value.message == (
        "too few runs to learn from: a model needs 10 prefills and 10 decode runs, and m had 0 and 9; watch the server "
        "for longer, under load, or let `aegis calibrate --probe` send it some"
    )
    with pytest.raises(UserError, match="10 decode runs, and none had any; watch the server for longer"):
        calibrate(Telemetry([], []), tmp_path / "costs.yaml")


def test_of_too_few_runs_those_of_the_model_with_most_are_told(tmp_path: Path) -> None:
    spans, _ = made(Truth(), runs=8)
    few = [replace(span, model=ModelId("few")) for span in spans if span.kind is SpanKind.DECODE]
    with pytest.raises(UserError, match=r"and [ab] had \d+ and [1-9]; watch"):
        calibrate(Telemetry([*few, *spans], []), tmp_path / "costs.yaml")


def test_runs_on_lanes_say_nothing_of_the_whole_device() -> None:
    spans, _ = made(Truth())
    later_ns = 10**15
    slow = [
        replace(
            span,
            share=500,
            start_ns=span.start_ns + later_ns,
            stop_ns=span.start_ns + later_ns + 3 * (span.stop_ns - span.start_ns),
        )
        for span in spans
    ]
    _, fits = fit_steps([*spans, *slow])
    for model, by in zip(MODELS, (1, 2), strict=True):
        assert fits[model].decode == pytest.approx(scaled(Truth().decode, by), rel=1e-3)
        assert fits[model].prefill == pytest.approx(scaled(Truth().prefill, by), rel=1e-3)
