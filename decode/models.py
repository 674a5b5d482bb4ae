"""The models of a decode or mixed instance: they come and go, and it is learnt how long their steps take."""

from __future__ import annotations

from collections.abc import Callable, Set

from aegis.core.estimators import Hardware, Latency
from aegis.core.ids import ModelId
from aegis.core.messages import AddModel, FromInstance, ModelAdded, ModelDropped, ModelFailed
from decode.step_times import StepTimes
from memory.ledger import Ledger


class Models:
    """`latency` is of those that are there."""

    def __init__(self, ledger: Ledger, hardware: Hardware, send: Callable[[FromInstance], None]) -> None:
        self.latency: dict[ModelId, Latency] = {}
        self._ledger = ledger
        self._hardware = hardware
        self._send = send
        self._step_times = StepTimes()
        self._dropping: set[ModelId] = set()

    @property
    def dropping(self) -> bool:
        return bool(self._dropping)

    def add(self, event: AddModel) -> None:
        spec = event.spec
        if not self._ledger.add_model(spec):
            self._send(ModelFailed(spec.model, "no address space is left"))
            return
        self.latency[spec.model] = Latency(spec.manifest, self._hardware)
        self._send(ModelAdded(spec.model))

    def drop(self, model: ModelId) -> None:
        """As soon as it is not in use."""
        if model in self._ledger.specs:
            self._dropping.add(model)
        else:
            self._send(ModelDropped(model))  # it could not be added

    def drop_unused(self, in_use: Set[ModelId]) -> None:
        for model in sorted(self._dropping - in_use):
            if self._ledger.weights.is_loading(model):
                continue
            self._ledger.drop_model(model)
            self._dropping.remove(model)
            del self.latency[model]
            self._step_times.forget(model)
            self._send(ModelDropped(model))

    def saw_steps(self, model: ModelId, now_ns: int, *, context_tokens: int, rows: int, step_ns: int) -> None:
        latency = self.latency[model]
        took = self._step_times.saw(model, latency, now_ns, context_tokens=context_tokens, rows=rows, step_ns=step_ns)
        if took:
            self._send(took)
