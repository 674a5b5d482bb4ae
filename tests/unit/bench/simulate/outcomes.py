"""Outcomes written by hand."""

from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.messages import SwitchDone
from aegis.sim.sampling import HostUse
from aegis.sim.simulation import Outcome
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span, SpanKind

MS = 1_000_000


def record(number: int, *, at_ms: int = 0, token_ms: tuple[int, ...] = (), asked: int | None = None) -> Record:
    """A request that got tokens at these times; all of them on time."""
    times = tuple(ms * MS for ms in token_ms)
    return Record(
        request=RequestId(number),
        model=ModelId("m000"),
        arrival_ns=at_ms * MS,
        input_tokens=100,
        output_tokens=len(times) if asked is None else asked,
        ended="finished" if asked is None else "failed",
        on_time=len(times),
        first_ns=times[0] if times else None,
        last_ns=times[-1] if times else None,
        token_times_ns=times,
    )


def span(kind: SpanKind, start_ms: int, stop_ms: int, *, requests: int = 0) -> Span:
    return Span(InstanceId("decode-0"), kind, ModelId("m000"), start_ms * MS, stop_ms * MS, requests)


def switch(model: str, copy_ms: int, *, prefetched: bool = False) -> SwitchDone:
    return SwitchDone(ModelId(model), prefetched, 0, copy_ms * MS, 0, 1)


def outcome(
    *,
    records: list[Record] | None = None,
    spans: list[Span] | None = None,
    switches: list[SwitchDone] | None = None,
    samples: list[HostUse] | None = None,
    instances: int = 1,
    ended_ms: int = 1000,
) -> Outcome:
    counters: dict[InstanceId, dict[str, int]] = {InstanceId(f"decode-{i}"): {} for i in range(instances)}
    return Outcome(records or [], switches or [], spans or [], counters, ended_ms * MS, samples or [], [])
