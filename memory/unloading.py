"""Models whose weights are to leave all memory: their images do when no instance has the weights any more."""

from __future__ import annotations

from collections.abc import Collection

from aegis.core.ids import InstanceId, ModelId


class Unloading:
    """The instances that have not answered `UnloadModel` yet. A model that is wanted again meanwhile keeps its
    image."""

    def __init__(self) -> None:
        self._waiting: dict[ModelId, set[InstanceId]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def begin(self, model: ModelId, instances: Collection[InstanceId]) -> bool:
        """Whether its image may leave at once; asked again, all of them are waited for anew."""
        self._waiting[model] = set(instances)
        return self._over(model)

    def answered(self, model: ModelId, instance: InstanceId) -> bool:
        """Whether its image may leave now."""
        if model not in self._waiting:
            return False
        self._waiting[model].discard(instance)
        return self._over(model)

    def lost(self, instance: InstanceId) -> list[ModelId]:
        """Its process is gone, and with it all weights it had; those whose images may leave now."""
        return [model for model in list(self._waiting) if self.answered(model, instance)]

    def wanted(self, model: ModelId) -> None:
        """Its image stays, or the model is no more."""
        self._waiting.pop(model, None)

    def _over(self, model: ModelId) -> bool:
        if self._waiting[model]:
            return False
        del self._waiting[model]
        return True
