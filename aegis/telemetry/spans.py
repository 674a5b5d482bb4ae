"""Spans: the stretches of an instance's work. The simulator and the live server write the same spans; reports, timeline
exports and calibration read nothing else of an instance."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from aegis.core.effects import Run
from aegis.core.ids import InstanceId, ModelId
from aegis.core.messages import SwitchDone


class SpanKind(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    LOAD = "load"  # weights, wanted now
    PREFETCH = "prefetch"  # weights, for later
    SWAP_IN = "swap_in"
    SWAP_OUT = "swap_out"
    SWITCH = "switch"  # from the request for another model to its first step


class Span(Struct, frozen=True, array_like=True):
    """`[start_ns, stop_ns)` on one instance. `tokens` are a prefill's prompt, or the cached tokens of all rows before a
    decode run's first step; each of its `steps` adds one per request. Where `tokens` are those of a chunk of a prompt,
    `cached` ones came before it, and there is no step unless the chunk is the last. Where several prompts shared a
    step, these are sums, and `pieces` the positions `[start, stop)` of each. `streams` decoded in the step of prompts,
    with `stream_tokens` cached in all. `processor_ns` is for how long a run had a processor, where that is what it runs
    on: the rest of its time it waited for one. 0: not known. A run was on this `lane`, which has this `share` of the
    device, in thousandths: all of it where that is not divided. A switch whose weights' load began with it was
    `copy_ns` of its time waiting for them; 0 where they had come before or were on their way."""

    instance: InstanceId
    kind: SpanKind
    model: ModelId
    start_ns: int
    stop_ns: int
    requests: int = 0
    steps: int = 0
    tokens: int = 0
    nbytes: int = 0
    cached: int = 0
    processor_ns: int = 0
    lane: int = 0
    share: int = 1000
    pieces: tuple[tuple[int, int], ...] = ()
    streams: int = 0
    stream_tokens: int = 0
    copy_ns: int = 0

    @property
    def prompts(self) -> tuple[tuple[int, int], ...]:
        """The positions `[start, stop)` of each prompt of a prefill."""
        return self.pieces or ((self.cached, self.cached + self.tokens),)

    @property
    def on_whole_device(self) -> bool:
        return self.share == 1000

    @property
    def device_ns(self) -> int:
        """The time for which it would have the whole device, if it had as much of it: its time, but for lanes."""
        return (self.stop_ns - self.start_ns) * self.share // 1000


def run_span(
    instance: InstanceId,
    run: Run,
    start_ns: int,
    stop_ns: int,
    steps: int,
    *,
    processor_ns: int = 0,
    share: int = 1000,
) -> Span:
    """Of a run that made tokens in so many steps."""
    prompts = run.prompts
    streams = run.rows[len(prompts) :]
    context = sum([row.start for row in streams])
    if not prompts:
        return Span(
            instance,
            SpanKind.DECODE,
            run.model,
            start_ns,
            stop_ns,
            len(streams),
            steps,
            context,
            processor_ns=processor_ns,
            lane=run.lane,
            share=share,
        )
    return Span(
        instance,
        SpanKind.PREFILL,
        run.model,
        start_ns,
        stop_ns,
        len(prompts),
        steps if any([row.samples for row in prompts]) else 0,
        sum([row.stop - row.start for row in prompts]),
        cached=sum([row.start for row in prompts]),
        processor_ns=processor_ns,
        lane=run.lane,
        share=share,
        pieces=tuple([(row.start, row.stop) for row in prompts]) if len(prompts) > 1 else (),
        streams=len(streams),
        stream_tokens=context,
    )


def switch_span(instance: InstanceId, done: SwitchDone, stop_ns: int) -> Span:
    """The span of a change of models that is done."""
    return Span(
        instance,
        SpanKind.SWITCH,
        done.model,
        stop_ns - done.duration_ns,
        stop_ns,
        nbytes=done.nbytes,
        copy_ns=0 if done.prefetched else done.copy_ns,
    )


class Spans(Struct, frozen=True, tag=True):
    """The spans that have ended since the last message, which an instance sends to the node now and then."""

    spans: tuple[Span, ...]
