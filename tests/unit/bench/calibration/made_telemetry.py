"""Spans and records of an instance pair whose costs are known."""

from __future__ import annotations

import random
from dataclasses import dataclass

from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span, SpanKind

PREFILL, DECODE = InstanceId("prefill-0"), InstanceId("decode-0")
MODELS = (ModelId("a"), ModelId("b"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Nanoseconds, but for the shares. Runs beside each other do not slow each other."""

    decode: tuple[float, float, float, float] = (2_000_000, 400, 300_000, 600_000)
    prefill: tuple[float, float, float] = (4_000_000, 30_000, 20)
    noise: float = 0.0  # each run takes up to so much more or less
    hiccups: float = 0.0  # this share of runs takes fifty times as long
    run_ns: int = 300_000
    switch_ns: int = 200_000
    message_ns: int = 500_000


def made(truth: Truth, *, runs: int = 600, seed: int = 0) -> tuple[list[Span], list[Record]]:
    """Prefills with pauses between, in the first half of the time beside decode runs."""
    draws, spans, records = random.Random(seed), list[Span](), list[Record]()
    scale = {MODELS[0]: 1.0, MODELS[1]: 2.0}
    stop_ns = _decodes(truth, draws, spans, scale, runs // 2)
    now_ns, before = 0, MODELS[0]
    for number in range(2 * runs):
        model, tokens = draws.choice(MODELS), draws.randrange(16, 1500)
        arrival_ns, now_ns = now_ns + 40_000_000, now_ns + 40_000_000 + truth.message_ns + truth.run_ns
        now_ns += truth.switch_ns if model != before or not number else 0
        before = model
        a, b, c = truth.prefill
        alone_ns = scale[model] * (a + b * tokens + c * tokens**2) * _noise(truth, draws)
        duration_ns = round(alone_ns)
        spans.append(Span(PREFILL, SpanKind.PREFILL, model, now_ns, now_ns + duration_ns, 1, 1, tokens))
        now_ns += duration_ns
        first_ns = now_ns + truth.message_ns
        records.append(
            Record(RequestId(number), model, arrival_ns, tokens, 2, "finished", 2, first_ns, max(first_ns, stop_ns))
        )
    return spans, records


def _decodes(truth: Truth, draws: random.Random, spans: list[Span], scale: dict[ModelId, float], runs: int) -> int:
    """One after the other, of any model. The time at which they end."""
    now_ns, before = 0, MODELS[0]
    for _ in range(runs):
        model, rows, steps = draws.choice(MODELS), draws.randrange(1, 9), draws.randrange(1, 65)
        context = rows * draws.randrange(16, 1800)
        now_ns += truth.run_ns + (truth.switch_ns if model != before else 0)
        a, b, c, d = truth.decode
        alone_ns = a * steps + b * (context * steps + rows * steps * (steps - 1) / 2) + c * rows * steps
        alone_ns += d * steps * (rows > 1)
        duration_ns = round(scale[model] * alone_ns * _noise(truth, draws))
        spans.append(Span(DECODE, SpanKind.DECODE, model, now_ns, now_ns + duration_ns, rows, steps, context))
        now_ns, before = now_ns + duration_ns, model
    return now_ns


def _noise(truth: Truth, draws: random.Random) -> float:
    hiccup = 50.0 if draws.random() < truth.hiccups else 1.0
    return hiccup * (1 + truth.noise * (2 * draws.random() - 1))
