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
    DivideDevice,
    Effect,
    EndRun,
    LoadWeights,
    RemoteLoad,
    Run,
    Send,
    StageImage,
    StreamName,
)
from aegis.core.events import InstanceEvent, Stepped, Tick
from aegis.core.ids import InstanceId, ModelId, RequestId
from aegis.core.messages import AddModel, Adopt, FromInstance, Submit, SwitchDone, ToInstance, Tokens
from aegis.core.model import ModelSpec
from aegis.core.request import Token
from aegis.sim.compute_shares import WHOLE
from aegis.sim.copies import Copy, Links, Streams
from aegis.sim.effects import InstanceEffects
from aegis.sim.event_queue import NEVER_NS, EventQueue
from aegis.sim.flows import Link
from aegis.sim.lane_run import DividedCompute, LaneRun
from aegis.sim.noise import RunNoise
from aegis.sim.processor_sharing import SharedProcessors
from aegis.sim.step_costs import StepCosts
from aegis.sim.timeline_semaphores import TimelineSemaphores
from aegis.sim.times import Times
from aegis.telemetry import instance_reports
from aegis.telemetry.decisions import DecisionLog
from aegis.telemetry.spans import Span, SpanKind, run_span, switch_span
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
    """The core of a prefill, decode or mixed instance."""

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

    def link_of(self, instance: InstanceId) -> Link:
        """The link from the host to the instance's device."""
        ...


class SimInstance:
    """`switch_ns` is what a change of model takes besides its copy, `run_ns` what lies between two runs. Where it
    `reports`, as it must on a device that it shares, the market learns whether it is idle, and it that time passes.
    Where prompts run `by_layers`, pieces of one read nothing twice. One that `skips_kept` takes no
    time for what a workload says is kept of a prompt, which its core does not know of. With `noise` each run takes more
    or less than it costs. `divided` is its device where that has lanes: while one of them is free the core hears
    everything at once. A peer that carries a part of a load brings `peer_bytes_per_s` at most."""

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
        divided: DividedCompute | None = None,
        reports: bool = False,
        by_layers: bool = False,
        skips_kept: bool = False,
        noise: RunNoise | None = None,
        peer_bytes_per_s: int = 0,
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
        self._divided = divided
        self._by_layers = by_layers
        self._skips_kept = skips_kept
        self._noise = noise
        self.to_device = to_device
        self._peer_bytes_per_s = peer_bytes_per_s
        self._shares: tuple[int, ...] = (WHOLE,)
        self._runs: dict[int, LaneRun] = {}  # under way, by lane
        self._added: set[ModelId] = set()
        self._unheard: deque[InstanceEvent] = deque()
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
            others={
                Decision: watch.decided.append,
                DivideDevice: self._divide,
                RemoteLoad: self._share,
                StageImage: self._streams.stage,
            },
        )

    # --- what it is told ----------------------------------------------------------------------------------------------

    def tell(self, messages: Sequence[ToInstance]) -> None:
        """Takes messages that have arrived together. A model is bound when the first of its requests comes."""
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

    @property
    def _hears(self) -> bool:
        """Whether the core is told at once what happens: a lane is free."""
        return len(self._runs) < len(self._shares)

    def _look(self) -> None:
        """Something is new. The core is told at once if a lane is free, else at the next boundary between steps."""
        if self._hears:
            self._tell(None)
            return
        for lane_run in self._runs.values():
            if lane_run.begun and not lane_run.looking:
                self._look_at(lane_run, self._agenda.now_ns)

    def _look_at(self, lane_run: LaneRun, at_ns: int) -> None:
        """When a step of the run ends, at that time or after it."""
        times = lane_run.times
        steps = max(times.boundary(at_ns), lane_run.heard_at + 1)
        if steps < times.steps:
            lane_run.looking = True
            self._agenda.at(times.of(steps - 1), self._between_steps, lane_run, lane_run.version, steps)

    def _between_steps(self, lane_run: LaneRun, version: int, steps: int) -> None:
        if version != lane_run.version or steps <= lane_run.heard_at:
            return
        lane_run.looking, lane_run.heard_at = False, steps
        self._report()
        self._unheard += self._streams.progress()
        lane_run.at_boundary = True
        while self._unheard and not lane_run.ends:
            self._tell_core(self._unheard.popleft())
        lane_run.at_boundary = False
        if lane_run.ends:
            lane_run.times.steps = steps
            self._ended(lane_run, lane_run.version)
        elif self._reporter:
            self._report_later()

    def _tell(self, answer: Stepped | None) -> None:
        """Tells the core what it has not heard, while a lane is free; the answer of a run comes last. Ends when the
        core asks for a run on the last free lane."""
        unheard, reports = self._unheard, self._reporter is not None
        if answer and reports:
            self._report()
        unheard += self._streams.progress()
        if answer:
            unheard.append(answer)
        while unheard and self._hears:
            self._tell_core(unheard.popleft())
        if unheard:
            self._look()
        if reports:
            if not self._runs:
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
        """Reports as a live instance does, at the end of each step and when there is nothing else to do."""
        now_ns = self._agenda.now_ns
        if self._reporter and self._reporter.due(now_ns):
            report = self._reporter.report(now_ns)
            if report:
                self._watch.hear(self.instance, [report])

    def _report_later(self) -> None:
        """Comes back when a report is due, or pages are owed for long."""
        reporter, now_ns = self._reporter, self._agenda.now_ns
        if reporter is None:
            return
        due_ns = reporter.due_ns
        if not self._runs:
            tick_ns = self._told_ns + OWING_NS if self.core.ledger.balloon.owes else NEVER_NS
            self._wake(min(NEVER_NS if due_ns is None else due_ns, tick_ns))
        elif due_ns is not None:
            for lane_run in [each for each in self._runs.values() if each.begun]:
                looking = lane_run.looking
                self._look_at(lane_run, max(due_ns, now_ns))
                lane_run.looking = looking

    def _wake(self, at_ns: int) -> None:
        if at_ns < self._wakes_ns:
            self._wakes_ns = at_ns
            self._agenda.at(at_ns, self._idle, at_ns)

    def _idle(self, at_ns: int) -> None:
        if at_ns != self._wakes_ns:
            return
        self._wakes_ns = NEVER_NS
        if not self._runs:
            if self.core.ledger.balloon.owes and self._agenda.now_ns >= self._told_ns + OWING_NS:
                self._unheard.append(Tick())
            self._tell(None)

    def _divide(self, effect: DivideDevice) -> None:
        assert not self._runs and (self._divided or effect.shares == (WHOLE,))
        self._shares = effect.shares

    def _end_run(self, effect: EndRun) -> None:
        """At the next boundary, if the core does not ask at one. A run whose answer is on its way is over."""
        lane_run = self._runs.get(effect.lane)
        if lane_run is None or lane_run.ends:
            return
        lane_run.ends = True
        if not lane_run.at_boundary:
            times, now_ns = lane_run.times, self._agenda.now_ns
            times.steps = max(times.boundary(now_ns), lane_run.heard_at)
            lane_run.version += 1
            self._ends_at(lane_run, max(times.of(times.steps - 1), now_ns))

    def _send(self, effect: Send) -> None:
        message = effect.message
        self._outbox.append(message)
        if type(message) is SwitchDone:
            self._switched = True
            if self._watch.spans is not None:
                self._watch.spans.append(switch_span(self.instance, message, self._agenda.now_ns))

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _begin(self, run: Run) -> None:
        assert run.lane not in self._runs and run.steps > 0, "two runs on one lane, or one without room for a step"
        late_ns, self._switched = self._switch_ns if self._switched else 0, False
        lengths = self._watch.output_tokens
        left = [lengths(row.job.request) - row.index for row in run.rows]
        lane_run = self._runs[run.lane] = LaneRun(run, left, self._slowed)
        costs = self._costs[run.model]
        lane_run.begin(
            self._agenda.now_ns + late_ns + self._run_ns,
            costs.scaled(self._noise.factor_ppm()) if self._noise else costs,
            share=self._shares[run.lane],
            divided=self._divided,
            processors=self._processors,
            by_layers=self._by_layers,
            skips_kept=self._skips_kept,
        )
        self._ends_at(lane_run, lane_run.times.of(lane_run.times.steps - 1))

    def _ends_at(self, lane_run: LaneRun, at_ns: int) -> None:
        self._agenda.at(at_ns, self._ended, lane_run, lane_run.version)

    def _slowed(self, lane_run: LaneRun) -> None:
        """Others began or ended a run beside it: this one ends at another time."""
        looked, now_ns = lane_run.looking, self._agenda.now_ns
        lane_run.slow(now_ns)
        lane_run.looking = False
        self._ends_at(lane_run, max(lane_run.times.of(lane_run.times.steps - 1), now_ns))
        if looked:
            self._look()
        self._report_later()

    def _ended(self, lane_run: LaneRun, version: int) -> None:
        """The run has ended. Tokens that prompts made are reported by cores, those of rows that decode by shells."""
        if version != lane_run.version:
            return
        run, times = lane_run.run, lane_run.times
        share = self._shares[run.lane]
        del self._runs[run.lane]
        lane_run.over(self._divided, self._processors)
        steps, finished, asked = times.steps, list[Token](), 0
        tokens = (_TOKEN,) * steps
        for row, left in zip(run.rows, lane_run.left, strict=True):
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
            self._watch.spans.append(run_span(self.instance, run, times.start_ns, now_ns, told, share=share))
        before = ((_TOKEN,) * asked,) * (steps - 1)
        made_at = (*before, tuple(finished)) if asked else ()
        self._tell(Stepped(made_at, now_ns - times.start_ns, lane=run.lane))

    # --- copies -------------------------------------------------------------------------------------------------------

    def _load(self, effect: LoadWeights) -> None:
        self._streams.load(effect, self._specs[effect.model].manifest.image_bytes)

    def _share(self, effect: RemoteLoad) -> None:
        self._streams.help(effect.load, self._watch.link_of(effect.instance), self._peer_bytes_per_s)

    def _abandon(self, effect: AbandonLoad) -> None:
        self._streams.abandon(effect.event)

    def _copied(self, copy: Copy) -> None:
        kind = _COPIES.get(copy.stream)
        if kind and self._watch.spans is not None:
            now_ns = self._agenda.now_ns
            span = Span(self.instance, kind, copy.model, copy.started_ns, now_ns, nbytes=copy.nbytes)
            self._watch.spans.append(span)
        self._look()
