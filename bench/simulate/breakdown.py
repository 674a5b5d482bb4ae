"""The time of requests by stages (Aegaeon §7.3, Figure 14)."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from aegis.core.clock import NS_PER_S
from aegis.sim.simulation import Outcome
from aegis.telemetry.spans import Span, SpanKind
from bench.simulate.setting import Setting, pool_of, run

STAGES = ("prefill_wait", "prefill", "decode_wait", "decode", "kv_copies", "messages")
_BEFORE_FIRST = 2  # messages: to prefill, and the first token from there
_MESSAGES = _BEFORE_FIRST + 1  # to decode; tokens from there are under way while the next ones are made
_COPIES = (SpanKind.SWAP_IN, SpanKind.SWAP_OUT)


class Breakdown(Struct, frozen=True):
    """Shares of the time from arrival to last token, all requests together. Runs count once for each request in them,
    `kv_copies` for as long as they last though most of that is hidden behind other waiting, which is counted less."""

    prefill_wait: float
    prefill: float
    decode_wait: float
    decode: float
    kv_copies: float
    messages: float
    mean_s: float


def measure(setting: Setting) -> Breakdown:
    """Raises UserError."""
    return breakdown(run(setting), pool_of(setting).gpu.handover_ns // 2)


def breakdown(outcome: Outcome, message_ns: int) -> Breakdown:
    done = [
        (record.first_ns - record.arrival_ns, record.last_ns - record.first_ns)
        for record in outcome.records
        if record.first_ns is not None and record.last_ns is not None
    ]
    first_ns, rest_ns = sum(first for first, _ in done), sum(rest for _, rest in done)
    spent_ns = {
        "prefill": _spent_ns(outcome.spans, SpanKind.PREFILL),
        "decode": _spent_ns(outcome.spans, SpanKind.DECODE),
        "kv_copies": sum(span.stop_ns - span.start_ns for span in outcome.spans if span.kind in _COPIES),
        "messages": _MESSAGES * message_ns * len(done),
    }
    spent_ns["prefill_wait"] = first_ns - spent_ns["prefill"] - _BEFORE_FIRST * message_ns * len(done)
    spent_ns["decode_wait"] = rest_ns - spent_ns["decode"] - spent_ns["kv_copies"] - message_ns * len(done)
    total_ns = max(first_ns + rest_ns, 1)
    shares = {stage: round(max(ns, 0) / total_ns, 6) for stage, ns in spent_ns.items()}
    return Breakdown(**shares, mean_s=round(total_ns / NS_PER_S / max(len(done), 1), 6))


def _spent_ns(spans: Sequence[Span], kind: SpanKind) -> int:
    return sum((span.stop_ns - span.start_ns) * span.requests for span in spans if span.kind == kind)
