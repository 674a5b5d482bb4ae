"""Spans and records as Chrome's trace events, for ui.perfetto.dev and chrome://tracing.

A process is an instance, its threads are what it does at a time: compute, weights, prefetch, KV in and out; and what it
computes on the second lane of its device, while that is divided. Events of a
thread have to nest, so that one which begins before the last has ended is drawn from that end on. What is evicted or
refused is an instant. A flow leads each request from its prefill to its first and its last run. Times are microseconds
since the first event.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec

from aegis.core.decision import Decision, DecisionKind
from aegis.core.ids import InstanceId
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span, SpanKind
from bench.report.matching import Ends, Match, matches
from bench.report.run import Run
from bench.report.usage import instances

_Event = dict[str, Any]

_THREADS = ("compute", "weights", "prefetch", "KV in", "KV out", "compute, second lane")
_SECOND_LANE = 5
_THREAD = {
    SpanKind.PREFILL: 0,
    SpanKind.DECODE: 0,
    SpanKind.SWITCH: 0,
    SpanKind.LOAD: 1,
    SpanKind.PREFETCH: 2,
    SpanKind.SWAP_IN: 3,
    SpanKind.SWAP_OUT: 4,
}
_PHASES = {2: "sf", 3: "stf"}
_MARKED = (DecisionKind.EVICT, DecisionKind.REFUSE)
_REQUESTS = 1  # the process of what is of no instance


def encode(run: Run) -> bytes:
    """A JSON object with `traceEvents`, in order of time. The same run gives the same bytes."""
    process = {name: number for number, name in enumerate(instances(run.spans), start=_REQUESTS + 1)}
    events = sorted(_events(run, process), key=lambda event: (event["ts"], -event.get("dur", 0)))
    content = {
        "displayTimeUnit": "ms",
        "otherData": {"start_ns": run.start_ns},
        "traceEvents": [*_names(process, {span.instance for span in run.spans if span.lane}), *events],
    }
    return msgspec.json.encode(content) + b"\n"


def _events(run: Run, process: dict[InstanceId, int]) -> Iterator[_Event]:
    for name, spans in instances(run.spans).items():
        for thread in range(len(_THREADS)):
            own = [span for span in spans if _thread(span) == thread]
            yield from _slices(own, process[name], run)
        yield from _marks([each for each in run.decisions if each.instance == name], process[name], run.start_ns)
        yield from _batches([span for span in spans if span.kind is SpanKind.DECODE], process[name], run.start_ns)
    yield from _marks([each for each in run.decisions if each.instance not in process], _REQUESTS, run.start_ns)
    if run.one_clock:
        yield from _waiting(run.records, run.start_ns)
        yield from _flows(run, process)


def _names(process: dict[InstanceId, int], divided: Collection[InstanceId]) -> Iterator[_Event]:
    """`divided` are the instances that have run something on a second lane."""
    for name, number in (("requests", _REQUESTS), *process.items()):
        yield _named("process_name", number, 0, name=name)
        yield _named("process_sort_index", number, 0, sort_index=number)
    for name, number in process.items():
        for thread, title in enumerate(_THREADS):
            if thread == _SECOND_LANE and name not in divided:
                continue
            yield _named("thread_name", number, thread, name=title)
            yield _named("thread_sort_index", number, thread, sort_index=thread)


def _named(what: str, process: int, thread: int, **args: object) -> _Event:
    return {"ph": "M", "name": what, "pid": process, "tid": _tid(process, thread), "ts": 0, "args": args}


def _slices(spans: Iterable[Span], process: int, run: Run) -> Iterator[_Event]:
    """The slices of one thread."""
    ended_ns = zero_ns = run.start_ns
    for span in sorted(spans, key=lambda span: (span.start_ns, span.stop_ns)):
        start_ns = max(span.start_ns, ended_ns)
        ended_ns = max(span.stop_ns, start_ns)
        args = {"model": span.model, "requests": span.requests, "steps": span.steps, "tokens": span.tokens}
        args |= {"bytes": span.nbytes, "cached": span.cached, "why": run.reasons.line(span)}
        args |= {} if span.on_whole_device else {"share": span.share / 1000}
        yield {
            "ph": "X",
            "name": f"{span.kind} {span.model}".strip(),
            "cat": span.kind,
            "pid": process,
            "tid": _tid(process, _thread(span)),
            "ts": _us(start_ns - zero_ns),
            "dur": _us(ended_ns - start_ns),
            "args": {k: v for k, v in args.items() if v},
        }


def _thread(span: Span) -> int:
    return _SECOND_LANE if span.lane else _THREAD[span.kind]


def _marks(decisions: Iterable[Decision], process: int, zero_ns: int) -> Iterator[_Event]:
    """Marks of evictions and refusals."""
    for each in decisions:
        if each.kind in _MARKED:
            yield {
                "ph": "i",
                "s": "t",
                "name": f"{each.kind} {each.model}",
                "cat": each.kind,
                "pid": process,
                "tid": _tid(process, 0),
                "ts": _us(each.at_ns - zero_ns),
                "args": {"why": each.line},
            }


def _batches(runs: Iterable[Span], process: int, zero_ns: int) -> Iterator[_Event]:
    """The size of the batch over time, of all that decode: on a divided device two runs may be under way."""
    changes: dict[int, int] = {}
    for span in runs:
        changes[span.start_ns] = changes.get(span.start_ns, 0) + span.requests
        changes[span.stop_ns] = changes.get(span.stop_ns, 0) - span.requests
    count = 0
    for at_ns, change in sorted(changes.items()):
        count += change
        yield _counter("batch", process, at_ns - zero_ns, count)


def _waiting(records: Iterable[Record], zero_ns: int) -> Iterator[_Event]:
    """The number of requests without a token."""
    steps = [(record.arrival_ns, 1) for record in records if record.first_ns is not None]
    steps += [(record.first_ns, -1) for record in records if record.first_ns is not None]
    count = 0
    for at_ns, step in sorted(steps):
        count += step
        yield _counter("waiting for the first token", _REQUESTS, at_ns - zero_ns, count)


def _counter(name: str, process: int, at_ns: int, count: int) -> _Event:
    return {
        "ph": "C",
        "name": name,
        "pid": process,
        "tid": _tid(process, 0),
        "ts": _us(at_ns),
        "args": {"requests": count},
    }


def _flows(run: Run, process: dict[InstanceId, int]) -> Iterator[_Event]:
    runs = Ends((span for span in run.spans if span.kind is SpanKind.DECODE), lambda span: (span.instance, span.model))
    found, _ = matches(run.records, run.spans)
    for match in found:
        if match.run is None:
            continue
        places = _places(match, runs)
        for place, phase in zip(places, _PHASES[len(places)], strict=True):
            yield {
                "ph": phase,
                "name": "request",
                "cat": "request",
                "id": match.record.request,
                "pid": process[place.instance],
                "tid": _tid(process[place.instance], _thread(place)),
                "ts": _us(place.start_ns - run.start_ns),
                "bp": "e",
            }


def _places(match: Match, runs: Ends) -> list[Span]:
    """The prefill, the first and the last run of a request; two where it had one run only."""
    assert match.run is not None
    first = runs.next((match.run.instance, match.record.model), match.prefill.stop_ns)
    between = [first] if first is not None and first.start_ns < match.run.start_ns else []
    return [match.prefill, *between, match.run]


def _tid(process: int, thread: int) -> int:
    """A number that no other process has: Perfetto takes a thread's name for that of all with its number."""
    return 10 * process + thread


def _us(ns: int) -> float:
    return ns / 1000
