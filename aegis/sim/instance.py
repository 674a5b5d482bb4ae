"""One simulated instance: the very core that serves, and a shell that does nothing but take time.

Runs and copies last as long as the cost models say. Everything else a core asks for is done at once. As a live
instance, this one tells its core nothing during a step: what arrives meanwhile is told at the next boundary between
two steps, messages first, then what the streams completed, then the run's answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from aegis.core.decision import Decision
from aegis.core.effects import (
    AbandonLoad,
    Effect,
    EndRun,
    LoadWeights,
    Run,
    Send,
    StreamName,
)
from aegis.core.events import InstanceEvent, Stepped, Tick
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.messages import AddModel, Adopt, FromInstance, Submit, SwitchDone, ToInstance, Tokens
from aegis.core.model import ModelSpec
from aegis.core.request import Token
from aegis.sim.copies import Copy, Links, Streams
from aegis.sim.effects import InstanceEffects
from aegis.sim.event_queue import NEVER_NS, EventQueue
from aegis.sim.flows import Link
from aegis.sim.processor_sharing import RunProgress, SharedProcessors
from aegis.sim.step_costs import StepCosts
from aegis.sim.timeline_semaphores import TimelineSemaphores
from aegis.sim.times import OneStep, Times
from aegis.telemetry import instance_reports
from aegis.telemetry.decisions import DecisionLog
from aegis.telemetry.spans import Span, SpanKind, run_span
from memory.balloon import OWING_NS

END: Final = 1
"""The token that every model ends with, here."""

_WITH_JOB: Final = (Submit, Adopt)
_TOKEN: Final = Token(0)
_LAST: Final = Token(END)
_COPIES: Final = {
    StreamName.WEIGHTS: SpanKind.LOAD,
    StreamName.PREFETCH: SpanKind.PREFETCH,
    StreamName.SWAP_IN: SpanKind.SWAP_IN,
    StreamName.SWAP_OUT: SpanKind.SWAP_OUT,
}


class Core(instance_reports.Core, Protocol):
    """The core of an instance that serves."""

    def on(self, event: InstanceEvent, now_ns: int) -> list[Effect]: ...


class Watch(Protocol):
    """The world around an instance."""

    spans: list[Span] | None
    decided: list[Decision]
    decisions: DecisionLog | None

    def output_tokens(self, request: RequestId) -> int:
        """The length of its answer: known here, and to no core or policy."""
        ...

    def made(self, request: RequestId, index: int, times: Times) -> None:
        """Tokens of the request from number `index` on were made at these times."""
        ...

    def hear(self, instance: InstanceId, messages: list[FromInstance]) -> None: ...


class SimInstance:
    """`switch_ns` is what a change of model takes besides its copy, `run_ns` what lies between two runs. Where it
    `reports`, as it must on a device that it shares, the market learns whether it is idle, and it that time passes."""

    def __init__(
        self,
        instance: InstanceId,
        core: Core,
        *,
        agenda: EventQueue,
        watch: Watch,
        semaphores: TimelineSemaphores,
        to_device: Link,
        to_host: Link,
        costs: Mapping[ModelId, StepCosts],
        specs: Mapping[ModelId, ModelSpec],
        switch_ns: int = 0,
        run_ns: int = 0,
        processors: SharedProcessors | None = None,
        reports: bool = False,
    ) -> None:
        self.instance = instance
        self.core = core
        self._agenda = agenda
        self._watch = watch
        self._streams = Streams(semaphores, Links(to_device, to_host), done=self._copied)
        self._costs = costs
        self._specs = specs
        self._switch_ns = switch_ns
        self._run_ns = run_ns
        self._processors = processors if processors and processors.shared else None
        self._progress: RunProgress | None = None  # of the run, where there are processors to share
        self._most_steps = 0  # of the run
        self._left: list[int] = []  # tokens that its rows have to make
        self._added: set[ModelId] = set()
        self._unheard: deque[InstanceEvent] = deque()
        self._run: Run | None = None
        self._times: Times | None = None  # of the run
        self._version = 0  # of the run: what was scheduled for another one finds so
        self._looking = False  # at the boundary to come
        self._heard_at = 0  # the boundary where it did so last: after so many steps of the run
        self._ends = False
        self._outbox: list[FromInstance] = []
        self._switched = False
        self._reporter = instance_reports.Reporter(core) if reports else None
        self._told_ns = 0
        self._wakes_ns = NEVER_NS
        self._effects = InstanceEffects(
            send=self._send,
            run=self._begin,
            end_run=self._end_run,
            load=self._load,
            abandon=self._abandon,
            copy=self._streams.copy,
            wipe=self._streams.wipe,
            others={Decision: watch.decided.append},
        )

    # --- what it is told ----------------------------------------------------------------------------------------------

    def tell(self, messages: Sequence[ToInstance]) -> None:
        """They have arrived together. A model is bound when the first of its requests comes."""
        for message in messages:
            if isinstance(message, _WITH_JOB) and message.job.model not in self._added:
                self._added.add(message.job.model)
                self._unheard.append(AddModel(self._specs[message.job.model]))
            self._unheard.append(message)
        self._look()

    def add_models(self) -> None:
        """All of them now, as a live instance is told when it comes up."""
        self._added.update(self._specs)
        self._unheard += [AddModel(spec) for spec in self._specs.values()]
        self._look()

    def _look(self) -> None:
        """Something is new: it is told at the next boundary between steps, or at once where none is under way."""
        times = self._times
        if self._run is None:
            self._tell(None)
        elif times is not None and not self._looking:
            steps = max(times.boundary(self._agenda.now_ns), self._heard_at + 1)
            if steps < times.steps:
                self._looking = True
                self._agenda.at(times.of(steps - 1), self._between_steps, self._version, steps)

    def _between_steps(self, version: int, steps: int) -> None:
        if version != self._version or steps <= self._heard_at:
            return
        self._looking, self._heard_at = False, steps
        self._report()
        self._unheard += self._streams.progress()
        while self._unheard and not self._ends:
            self._tell_core(self._unheard.popleft())
        if self._ends:
            assert self._times is not None
            self._times.steps = steps
            self._ended(version)
        elif self._reporter:
            self._report_later()

    def _tell(self, answer: Stepped | None) -> None:
        """Between runs; the answer of one comes last. Ends with the run that is asked for, if one is."""
        unheard, reports = self._unheard, self._reporter is not None
        if answer and reports:
            self._report()
        unheard += self._streams.progress()
        if answer:
            unheard.append(answer)
        while unheard and self._run is None:
            self._tell_core(unheard.popleft())
        if unheard:
            self._look()
        if reports:
            if self._run is None:
                self._report()
            self._report_later()

    def _tell_core(self, event: InstanceEvent) -> None:
        """Performs what the core asks for; messages leave together."""
        now_ns = self._agenda.now_ns
        effects = self.core.on(event, now_ns)
        if self._reporter:
            self._reporter.note_event()
            self._told_ns = now_ns
        if self._watch.decisions:
            self._watch.decisions.did(self.instance, effects, now_ns)
        self._effects.perform(effects)
        if self._outbox:
            self._watch.hear(self.instance, self._outbox)
            self._outbox = []

    # --- what it says of itself, and how it is told that time passes -------------------------------------------------

    def _report(self) -> None:
        """As a live instance does, at the end of each step and when there is nothing else to do."""
        now_ns = self._agenda.now_ns
        if self._reporter and self._reporter.due(now_ns):
            report = self._reporter.report(now_ns)
            if report:
                self._watch.hear(self.instance, [report])

    def _report_later(self) -> None:
        """Comes back when a report is due, or pages are owed for long."""
        reporter, times, now_ns = self._reporter, self._times, self._agenda.now_ns
        if reporter is None:
            return
        due_ns = reporter.due_ns
        if self._run is None:
            tick_ns = self._told_ns + OWING_NS if self.core.ledger.balloon.owes else NEVER_NS
            self._wake(min(NEVER_NS if due_ns is None else due_ns, tick_ns))
        elif times is not None and due_ns is not None:
            steps = max(times.boundary(max(due_ns, now_ns)), self._heard_at + 1)
            if steps < times.steps:
                self._agenda.at(times.of(steps - 1), self._between_steps, self._version, steps)

    def _wake(self, at_ns: int) -> None:
        if at_ns < self._wakes_ns:
            self._wakes_ns = at_ns
            self._agenda.at(at_ns, self._idle, at_ns)

    def _idle(self, at_ns: int) -> None:
        if at_ns != self._wakes_ns:
            return
        self._wakes_ns = NEVER_NS
        if self._run is None:
            if self.core.ledger.balloon.owes and self._agenda.now_ns >= self._told_ns + OWING_NS:
                self._unheard.append(Tick())
            self._tell(None)

    def _end_run(self, effect: EndRun) -> None:
        self._ends = True

    def _send(self, effect: Send) -> None:
        message = effect.message
        self._outbox.append(message)
        if type(message) is SwitchDone:
            self._switched = True
            self._span(SpanKind.SWITCH, message.model, self._agenda.now_ns - switch_ns(message), nbytes=message.nbytes)

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _start_ns(self) -> int:
        late_ns, self._switched = self._switch_ns if self._switched else 0, False
        start_ns = self._agenda.now_ns + late_ns + self._run_ns
        if self._processors:
            self._processors.enter(self._slowed)
            self._progress = RunProgress(start_ns, self._processors.slowness)
        return start_ns

    def _slowed(self, slowness: int) -> None:
        """Others began or ended a run on the processors: this one ends at another time."""
        times, looked, now_ns = self._times, self._looking, self._agenda.now_ns
        assert self._progress is not None and times is not None and self._run is not None
        self._progress.change(now_ns, slowness)
        self._version += 1
        times.steps = self._most_steps
        times.steps = times.boundary(self._run.until_ns)
        self._looking = False
        self._agenda.at(max(times.of(times.steps - 1), now_ns), self._ended, self._version)
        if looked:
            self._look()
        self._report_later()

    def _over(self) -> None:
        """The run is."""
        self._version += 1
        if self._processors:
            self._processors.leave(self._slowed)

    def _begin(self, run: Run) -> None:
        self._run = run
        start_ns, costs, lengths = self._start_ns(), self._costs[run.model], self._watch.output_tokens
        pieces = [(row.start, row.stop) for row in run.prompts]
        streams = run.rows[len(pieces) :]
        context = sum([row.start for row in streams])
        self._left = [lengths(row.job.request) - row.index for row in run.rows]
        if pieces:
            self._most_steps = 1
            times: Times = OneStep(start_ns, costs.step_ns(pieces, context, len(streams)), self._progress)
        else:
            self._most_steps = min(run.steps, *self._left)
            times = Times(costs, start_ns, context, len(streams), self._most_steps, self._progress)
        self._times = times
        times.steps = steps = times.boundary(run.until_ns)
        self._version += 1
        self._looking = self._ends = False
        self._heard_at = 0
        self._agenda.at(times.of(steps - 1), self._ended, self._version)

    def _ended(self, version: int) -> None:
        """The run has. Cores report what prompts made, shells what rows that decode did."""
        if version != self._version:
            return
        run, times = self._run, self._times
        assert run is not None and times is not None
        self._run = self._times = None
        self._over()
        steps, finished, asked = times.steps, list[Token](), 0
        tokens = (_TOKEN,) * steps
        for row, left in zip(run.rows, self._left, strict=True):
            if not row.samples:
                continue
            job, index = row.job, row.index
            last = _LAST if left <= steps else _TOKEN
            asked += 1
            finished.append(last)
            self._watch.made(job.request, index, times)
            if row.decodes:
                made = tokens if last is _TOKEN else (*tokens[:-1], _LAST)
                finish = job.sampling.finish(index + steps - 1, last.id)
                self._outbox.append(Tokens(job.request, job.attempt, index, made, finish))
        now_ns = self._agenda.now_ns
        if self._watch.spans is not None:
            told = steps if asked else 0
            self._watch.spans.append(run_span(self.instance, run, times.start_ns, now_ns, told))
        before = ((_TOKEN,) * asked,) * (steps - 1)
        made_at = (*before, tuple(finished)) if asked else ()
        self._tell(Stepped(made_at, now_ns - times.start_ns, lane=run.lane))

    # --- copies -------------------------------------------------------------------------------------------------------

    def _load(self, effect: LoadWeights) -> None:
        self._streams.load(effect, self._specs[effect.model].manifest.image_bytes)

    def _abandon(self, effect: AbandonLoad) -> None:
        self._streams.abandon(effect.event)

    def _copied(self, copy: Copy) -> None:
        kind = _COPIES.get(copy.stream)
        if kind and self._watch.spans is not None:
            self._span(kind, copy.model, copy.started_ns, nbytes=copy.nbytes)
        self._look()

    def _span(self, kind: SpanKind, model: ModelId, start_ns: int, *, nbytes: int) -> None:
        if self._watch.spans is not None:
            self._watch.spans.append(Span(self.instance, kind, model, start_ns, self._agenda.now_ns, nbytes=nbytes))


def switch_ns(done: SwitchDone) -> int:
    """The duration of the whole change."""
    return done.make_room_ns + done.copy_ns + done.kv_ns
