"""Spans and records to try reports on, in few words, and a folder as a simulation leaves it."""

from functools import cache
from pathlib import Path

import msgspec

from aegis.core.decision import Decision, DecisionKind, Why
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.sim.simulation import Outcome
from aegis.telemetry import files
from aegis.telemetry.memory_report import (
    DeviceReport,
    HostKvReport,
    MemoryReport,
    ModelCacheReport,
    ShapeReport,
    SlabsReport,
)
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span, SpanKind
from bench.report.run import Run
from bench.simulate.figures import figures
from bench.simulate.setting import Setting, run
from bench.simulate.study import Curve, Point

MS = 1_000_000


def span(kind: str, start_ms: float, stop_ms: float, *, on: str = "decode-0", model: str = "a", **counts: int) -> Span:
    return Span(InstanceId(on), SpanKind(kind), ModelId(model), round(start_ms * MS), round(stop_ms * MS), **counts)


def record(
    number: int, arrival_ms: float, first_ms: float, last_ms: float, *, model: str = "a", tokens: int = 10
) -> Record:
    first_ns, last_ns = round(first_ms * MS), round(last_ms * MS)
    return Record(
        RequestId(number), ModelId(model), round(arrival_ms * MS), tokens, 5, "finished", 5, first_ns, last_ns
    )


def turn(at_ms: float, *, on: str = "decode-0", model: str = "a", kind: str = "turn") -> Decision:
    at_ns = round(at_ms * MS)
    why = Why(f"must begin before {at_ms} ms")
    return Decision(at_ns, InstanceId(on), DecisionKind(kind), ModelId(model), (RequestId(1),), f"{model} runs", why)


@cache
def outcome() -> Outcome:
    """Of a quarter of a minute."""
    workload = "poisson:models=12,rps=0.2,duration=15,lengths=sharegpt"
    return run(Setting(policy="aegaeon", workload=workload, prefill=1, decode=2), explains=True)


def simulated() -> Run:
    done = outcome()
    return Run("simulated", done.spans, done.records, decisions=done.decisions)


def memory_report(share: float) -> MemoryReport:
    shapes = tuple(
        ShapeReport((ModelId(f"m{at}"), ModelId("n"), ModelId("o")), (at + 1) << 20, 4, 10, 1, 60, 2, share)
        for at in range(2)
    )
    slabs = SlabsReport(8 << 30, share, shapes)
    device = DeviceReport(0, 70 << 30, 10 << 30, 0, 1 << 30, 2 << 20, (), slabs)
    return MemoryReport(
        (device,), HostKvReport(1 << 40, 10 << 30, 1 << 39, 0, 0, slabs), ModelCacheReport(1 << 40, 1 << 39, (), {})
    )


def served(attainment: float) -> bytes:
    """What `aegis bench serve --json` writes, as far as a report reads it."""
    met = round(1000 * attainment)
    return msgspec.json.encode(
        {"completed": 9, "failed": 1, "duration": 10.0, "slo_attainment": attainment, "slo_tokens_met": met}
        | {"median_ttft_ms": 80.0, "p99_ttft_ms": 200.0, "p99_itl_ms": 30.0, "request_throughput": 0.9}
    )


def fill(folder: Path) -> None:
    """Everything there can be: two runs, a sweep, memory reports."""
    done = outcome()
    files.write(folder / "sim.spans.jsonl.gz", done.spans)
    files.write(folder / "sim.records.jsonl", done.records)
    files.write(folder / "sim.decisions.jsonl.gz", done.decisions)
    files.write(folder / "sim.memory.jsonl", [memory_report(0.1), memory_report(0.2)])
    (folder / "live.json").write_bytes(served(0.8))
    told = figures(done)
    curves = [
        Curve(policy, tuple(Point(at, msgspec.structs.replace(told, attainment=1 - at / 100)) for at in (8.0, 16.0)))
        for policy in ("aegaeon", "serverlessllm")
    ]
    sweep = {"setting": {}, "sweep": {"key": "models", "values": ["8", "16"]}, "curves": curves}
    (folder / "fig.json").write_bytes(msgspec.json.encode(sweep))
