"""The models of an instance as they come and go, and which of them is active."""

from __future__ import annotations

from collections.abc import Callable, Set

from aegis.core.events import LoadFailed
from aegis.core.ids import ModelId
from aegis.core.messages import FromInstance, ImageUnreadable, ModelAdded, ModelDropped, ModelFailed
from aegis.core.model import ModelSpec
from memory.ledger import Ledger


class InstanceModels:
    """`active` is the model that ran last, until its weights are found to have left."""

    def __init__(self, ledger: Ledger, send: Callable[[FromInstance], None]) -> None:
        self.active: ModelId | None = None
        self._ledger = ledger
        self._send = send
        self._dropping: set[ModelId] = set()

    @property
    def dropping(self) -> bool:
        """Whether any is to go as soon as it is not in use."""
        return bool(self._dropping)

    def add(self, spec: ModelSpec) -> bool:
        """Whether there was address space left for it, which is answered."""
        added = self._ledger.add_model(spec)
        self._send(ModelAdded(spec.model) if added else ModelFailed(spec.model, "no address space is left"))
        return added

    def drop(self, model: ModelId) -> None:
        """Drops the model as soon as it is not in use."""
        if model in self._ledger.specs:
            self._dropping.add(model)
        else:
            self._send(ModelDropped(model))  # it could not be added

    def drop_unused(self, in_use: Set[ModelId]) -> list[ModelId]:
        """Drops those that are to go and are not `in_use`; returns them. A load under way ends first."""
        unused = [model for model in sorted(self._dropping - in_use) if not self._ledger.weights.is_loading(model)]
        for model in unused:
            self._ledger.drop_model(model)
            self._dropping.remove(model)
            self.active = None if self.active == model else self.active
            self._send(ModelDropped(model))
        return unused

    def unload(self, in_use: Set[ModelId]) -> None:
        """Weights that are to leave all memory leave this instance, unless they are `in_use`."""
        self._ledger.unload(in_use)
        self.check_active()

    def check_active(self) -> None:
        """None is active once its weights have left."""
        if self.active is not None and not self._ledger.weights.is_resident(self.active):
            self.active = None

    def load_failed(self, event: LoadFailed) -> None:
        """The image could not be read: the node makes it again, and the next request tries again."""
        self._ledger.weights.abandon(event.model)
        self._send(ImageUnreadable(event.model, event.reason))
