"""Performs the effects of an instance core, in order, on its engine, its memory and its link."""

from __future__ import annotations

from collections.abc import Sequence

from aegis.core.decision import Decision
from aegis.core.effects import Bind, DivideDevice, Effect, EndRun, Run, Send, Track, Unbind, Untrack
from aegis.core.errors import UserError
from aegis.core.events import InstanceEvent, StepFailed, Stepped
from aegis.core.ids import ModelId
from aegis.core.messages import DropModel, FromInstance, ModelAdded, ModelFailed, SwitchDone
from aegis.device.memory_executor import MemoryExecutor
from aegis.engine.protocol import Engine, EngineFailed
from aegis.instance.first_rank import FirstRankMemory
from aegis.instance.lanes import Lanes, failed
from aegis.instance.run_worker import RunWorker
from aegis.instance.span_log import SpanLog
from aegis.transport.links import InstanceLink


class EffectExecutor:
    """Performs the effects of a core."""

    def __init__(
        self,
        engine: Engine,
        memory_executor: MemoryExecutor | FirstRankMemory,
        link: InstanceLink,
        worker: RunWorker,
        lanes: Lanes,
        spans: SpanLog,
    ) -> None:
        self._engine = engine
        self._memory_executor = memory_executor
        self._link = link
        self._worker = worker
        self._lanes = lanes
        self._spans = spans
        self._refused: dict[ModelId, str] = {}

    def perform(self, effects: Sequence[Effect]) -> list[InstanceEvent]:
        """Returns the events that the core has to be told next. Messages leave before a step begins, in one batch. A
        run on the whole device ends in here, one on a lane goes on."""
        outbox: list[FromInstance] = []
        answers: list[InstanceEvent] = []
        for effect in effects:
            match effect:
                case Send(message):
                    outbox.append(self._checked(message))
                case Run():
                    self._flush(outbox)
                    answers += self._lanes.begin(effect) if self._lanes.divided else [self._run(effect)]
                case EndRun(lane):
                    self._lanes.end_soon(lane)  # of a run on the whole device the caller looks for it
                case DivideDevice(shares):
                    self._lanes.divide(shares)
                case Track(job, generated):
                    self._engine.start(job.model, job.request, job.prompt, generated, job.sampling)
                case Untrack(request):
                    self._lanes.stop(request)
                case Bind(spec):
                    if not self._bind(effect):
                        answers.append(DropModel(spec.model))
                case Decision():
                    self._spans.decided(effect)
                case Unbind(model):
                    self._engine.detach(model)
                    self._memory_executor.perform(effect)
                case _:
                    self._memory_executor.perform(effect)
        self._flush(outbox)
        return answers

    def _run(self, run: Run) -> Stepped | StepFailed:
        self._spans.begins()
        try:
            stepped = self._worker.run(run)
        except EngineFailed as error:
            return failed(error, run)
        self._spans.ran(run, stepped)
        return stepped

    def _bind(self, bind: Bind) -> bool:
        """False if the model is refused: the core is told to drop it, and its `Unbind` undoes what was done."""
        try:
            self._memory_executor.perform(bind)
            self._engine.attach(bind.spec, self._memory_executor.weights_base(bind))
        except UserError as error:
            self._engine.discard(bind.spec)
            self._refused[bind.spec.model] = error.message
            return False
        return True

    def _checked(self, message: FromInstance) -> FromInstance:
        if isinstance(message, SwitchDone):
            self._spans.switched(message)
        if isinstance(message, ModelAdded) and message.model in self._refused:
            return ModelFailed(message.model, self._refused.pop(message.model))
        return message

    def _flush(self, outbox: list[FromInstance]) -> None:
        if outbox:
            self._link.send(outbox)
            outbox.clear()
