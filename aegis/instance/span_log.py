"""Writes down what this instance does, and what it decided, in batches for the node."""

from __future__ import annotations

from collections.abc import Iterable

from aegis.core.clock import Clock
from aegis.core.decision import Decision
from aegis.core.effects import Run, StreamName
from aegis.core.events import Stepped
from aegis.core.ids import InstanceId
from aegis.core.messages import SwitchDone
from aegis.device.memory_executor import CopyDone
from aegis.telemetry.decisions import Decisions
from aegis.telemetry.spans import Span, SpanKind, Spans, run_span, switch_span

_COPIES = {
    StreamName.WEIGHTS: SpanKind.LOAD,
    StreamName.PREFETCH: SpanKind.PREFETCH,
    StreamName.SWAP_IN: SpanKind.SWAP_IN,
    StreamName.SWAP_OUT: SpanKind.SWAP_OUT,
}


class SpanLog:
    """One span for each run, copy and switch, none for a step: what it costs does not grow with the tokens.

    `processor` goes on while this thread has a processor; None if that is not what runs are made of. Copies are told
    by the machine's own clock, which is `ahead_ns` of the launcher's."""

    def __init__(
        self, instance: InstanceId, clock: Clock, processor: Clock | None = None, *, ahead_ns: int = 0
    ) -> None:
        self._instance = instance
        self._clock = clock
        self._processor = processor
        self._ahead_ns = ahead_ns
        self._began_ns = 0  # of the processor's
        self._spans: list[Span] = []
        self._decisions: list[Decision] = []

    def begins(self) -> None:
        """A run does."""
        if self._processor:
            self._began_ns = self._processor.now_ns()

    def ran(self, run: Run, stepped: Stepped) -> None:
        """Right after the run, which lasted as long as `stepped` says."""
        now_ns = self._clock.now_ns()
        had_ns = self._processor.now_ns() - self._began_ns if self._processor else 0
        start_ns, steps = now_ns - stepped.duration_ns, len(stepped.steps)
        self._spans.append(run_span(self._instance, run, start_ns, now_ns, steps, processor_ns=had_ns))

    def ran_on_lane(self, run: Run, stepped: Stepped, stop_ns: int, processor_ns: int, share: int) -> None:
        """A run that has ended at `stop_ns`, on a lane with this share of the device, in thousandths."""
        had_ns = processor_ns if self._processor else 0
        start_ns, steps = stop_ns - stepped.duration_ns, len(stepped.steps)
        self._spans.append(run_span(self._instance, run, start_ns, stop_ns, steps, processor_ns=had_ns, share=share))

    def switched(self, done: SwitchDone) -> None:
        """Right before the first step of the model that runs now."""
        self._spans.append(switch_span(self._instance, done, self._clock.now_ns()))

    def copied(self, copies: Iterable[CopyDone]) -> None:
        for copy in copies:
            kind = _COPIES.get(copy.stream)
            if kind:
                start_ns, stop_ns = copy.start_ns - self._ahead_ns, copy.stop_ns - self._ahead_ns
                span = Span(self._instance, kind, copy.model, start_ns, stop_ns, nbytes=copy.nbytes)
                self._spans.append(span)

    def decided(self, decision: Decision) -> None:
        self._decisions.append(decision)

    def drain(self) -> list[Spans | Decisions]:
        """The spans and decisions since the last call, to be sent."""
        spans, self._spans = self._spans, []
        decisions, self._decisions = self._decisions, []
        written: list[Spans | Decisions] = [Spans(tuple(spans))] if spans else []
        return [*written, Decisions(tuple(decisions))] if decisions else written
