"""Requests whose grammar is being compiled wait outside of the core, so that no step has to wait for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from aegis.core.events import InstanceEvent
from aegis.core.ids import ModelId
from aegis.core.messages import Adopt, Cancel, DropModel, DropProxy, ForgetPeer, HandOver, Shutdown, Submit
from aegis.core.request import Sampling

_Work = Submit | Adopt


class Compiling(Protocol):
    """An engine, as far as it is asked here."""

    def ready(self, model: ModelId, sampling: Sampling) -> bool: ...


class GrammarWait:
    """Keeps order where it matters: what is said of a request, or of all that its model, its proxy or another instance
    has to do with, comes after the request. A request released early has its grammar waited for in its step."""

    def __init__(self, engine: Compiling) -> None:
        self._engine = engine
        self._waiting: list[_Work] = []

    def passed(self, event: InstanceEvent) -> list[InstanceEvent]:
        """The events that the core gets now in place of `event`."""
        match event:
            case Submit(job) | Adopt(job):
                if self._engine.ready(job.model, job.sampling):
                    return [event]
                self._waiting.append(event)
                return []
            case Cancel(request) | HandOver(request):
                return [*self._released(lambda work: work.job.request == request), event]
            case DropModel() | DropProxy() | ForgetPeer() | Shutdown():
                return [*self._released(lambda _: True), event]
        return [event]

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def ready(self) -> list[InstanceEvent]:
        """The events that need not wait any more."""
        if not self._waiting:
            return []
        return self._released(lambda work: self._engine.ready(work.job.model, work.job.sampling))

    def _released(self, when: Callable[[_Work], bool]) -> list[InstanceEvent]:
        released, kept = list[InstanceEvent](), list[_Work]()
        for work in self._waiting:
            (released if when(work) else kept).append(work)
        self._waiting = kept
        return released
