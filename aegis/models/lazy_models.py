"""Models that are registered when a request wants them first: what is known of them until then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from aegis.core.ids import ModelId
from aegis.models.sources import Source
from aegis.telemetry.registration import RegisteringModel

_WAITS = "its weights are fetched at its first request"


@dataclass(slots=True)
class _Lazy:
    source: Source
    bringing: bool = False
    tries: int = 0
    refusal: str = ""


class LazyModels:
    """The lazy models, by their names."""

    def __init__(self) -> None:
        self._models: dict[ModelId, _Lazy] = {}

    def __contains__(self, model: object) -> bool:
        return model in self._models

    def add(self, source: Source, refusal: str = "") -> None:
        """`refusal` is why it went away again, if it was there before."""
        self._models[source.model] = _Lazy(source, refusal=refusal, tries=1 if refusal else 0)

    def revise(self, source: Source) -> bool:
        """Whether it was here; on these terms from now on."""
        if source.model not in self._models:
            return False
        self._models[source.model].source = source
        return True

    def remove(self, model: ModelId) -> bool:
        """Whether it was here."""
        return self._models.pop(model, None) is not None

    def bring(self, model: ModelId) -> Source | None:
        """The model's source, if it is to be registered now; None if it is being registered, or is not here."""
        lazy = self._models.get(model)
        if lazy is None or lazy.bringing:
            return None
        lazy.bringing = True
        return lazy.source

    def is_brought(self, model: ModelId) -> bool:
        """Whether it is being registered, and waits here until that has ended well."""
        return model in self._models and self._models[model].bringing

    def refused(self, model: ModelId, refusal: str) -> None:
        """The model could not be registered, and waits for the next request that wants it."""
        if lazy := self._models.get(model):
            lazy.bringing, lazy.refusal = False, refusal
            lazy.tries += 1

    def cards(self, registering: Mapping[ModelId, RegisteringModel]) -> dict[ModelId, RegisteringModel]:
        """What is shown of them, beside those that are being registered."""
        cards = dict(registering)
        for model, lazy in self._models.items():
            if model in registering:
                cards[model] = replace(registering[model], tries=lazy.tries, refusal=lazy.refusal)
            else:
                progress = f"{_WAITS}; last time: {lazy.refusal}" if lazy.refusal else _WAITS
                cards[model] = RegisteringModel(lazy.source.root, progress, True, lazy.tries, lazy.refusal)
        return cards
