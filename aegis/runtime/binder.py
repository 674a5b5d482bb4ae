"""Builds the modules of a model that is added while steps run, in a thread beside them.

A core learns of the model when its modules are there: binding them then is a matter of a millisecond. An idle instance
builds at once, so that what a restarted one is sent arrives in order.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from aegis.core.errors import UserError
from aegis.core.events import InstanceEvent
from aegis.core.messages import AddModel, DropModel
from aegis.engine.base import Engine


class Binder:
    """Holds `AddModel` events back while their modules are built."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="build")
        self._building: list[tuple[Future[None], AddModel]] = []

    def defer(self, event: InstanceEvent, *, busy: bool) -> bool:
        """Whether the event is kept here. Of a model dropped while it is being built the core hears that alone."""
        match event:
            case AddModel() if busy or self._building:
                self._building.append((self._thread.submit(self._build, event), event))
                return True
            case DropModel(model):
                self._building = [entry for entry in self._building if entry[1].spec.model != model]
        return False

    def ready(self) -> list[AddModel]:
        """Those whose modules have been built since the last call, in order."""
        ready = []
        while self._building and self._building[0][0].done():
            future, event = self._building.pop(0)
            future.result()
            ready.append(event)
        return ready

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _build(self, event: AddModel) -> None:
        try:
            self._engine.prepare(event.spec)
        except UserError:
            return  # attaching says it again, to whom it concerns
