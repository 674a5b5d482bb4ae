"""Prepares a model that is added while steps run, in a thread beside them: its modules are built, its image is mapped.

A core learns of the model when all that is there: binding it then is a matter of a millisecond. An idle instance does
it at once, so that what a restarted one is sent arrives in order.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from msgspec.structs import replace

from aegis.core.errors import UserError
from aegis.core.events import InstanceEvent
from aegis.core.ids import ModelId
from aegis.core.messages import AddModel, DropModel, SetSlo
from aegis.core.model import ModelSpec, Slo


class Preparing(Protocol):
    """A part that has work to do before a model is bound: an engine, a mover."""

    def prepare(self, spec: ModelSpec) -> None: ...

    def discard(self, spec: ModelSpec) -> None: ...


class ModelBinder:
    """Holds `AddModel` events back while their models are prepared by all `parts`."""

    def __init__(self, *parts: Preparing) -> None:
        self._parts = parts
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="build")
        self._building: list[tuple[Future[None], AddModel]] = []

    def defer(self, event: InstanceEvent, *, busy: bool) -> bool:
        """Whether the event is kept here. Of a model dropped while it is being prepared the core hears that alone."""
        match event:
            case AddModel(spec) if busy or self._building:
                self._building.append((self._thread.submit(self._prepare, spec), event))
                return True
            case SetSlo(model, slo):
                self._building = [(future, _due(event, model, slo)) for future, event in self._building]
            case DropModel(model):
                self._forget([entry for entry in self._building if entry[1].spec.model == model])
        return False

    def ready(self) -> list[AddModel]:
        """The models that have been prepared since the last call, in order."""
        ready = []
        while self._building and self._building[0][0].done():
            future, event = self._building.pop(0)
            future.result()
            ready.append(event)
        return ready

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _forget(self, dropped: list[tuple[Future[None], AddModel]]) -> None:
        for future, event in dropped:
            self._building.remove((future, event))
            if not future.cancel():  # it is under way, or done
                self._thread.submit(self._discard, event.spec)

    def _prepare(self, spec: ModelSpec) -> None:
        for part in self._parts:
            with suppress(UserError):  # binding raises it again, and reports it
                part.prepare(spec)

    def _discard(self, spec: ModelSpec) -> None:
        for part in self._parts:
            part.discard(spec)


def _due(event: AddModel, model: ModelId, slo: Slo) -> AddModel:
    return AddModel(replace(event.spec, slo=slo)) if event.spec.model == model else event
