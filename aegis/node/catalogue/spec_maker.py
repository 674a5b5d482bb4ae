"""Specs of checkpoints and adapters, as registrars make them: with the server's type, engine and weights, an adapter
for the base that is served."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.models.sources import Source
from aegis.models.terms import Terms
from aegis.node.catalogue.adapters import find_base
from aegis.node.catalogue.model import CatalogueModel
from aegis.node.registration import Register, RegistrationCancelled, Report

Outcome = tuple[Source, ModelSpec | ModelRefused | None]
"""None of a lazy source whose image is still to be made."""


class SpecMaker:
    """Makes them, whatever becomes of them; `models` are those that are served."""

    def __init__(self, register: Register, models: Mapping[ModelId, CatalogueModel], terms: Terms) -> None:
        self._register = register
        self._models = models
        self._terms = terms

    async def make(
        self,
        sources: Sequence[Source],
        report: Report = lambda _model, _text: None,
        unwanted: RegistrationCancelled | None = None,
        *,
        renew: bool = False,
        wanted: bool = True,
    ) -> AsyncIterator[Outcome]:
        """Adapters last, each once its base is there, or is known not to come."""
        alone = [source for source in sources if not source.adapter]
        register = partial(
            self._register, terms=self._terms, report=report, unwanted=unwanted, renew=renew, wanted=wanted
        )
        if alone:
            async for outcome in register(alone):
                yield outcome
        by_base: dict[ModelId, list[Source]] = {}
        for source in [source for source in sources if source.adapter]:
            base = await find_base(source, self._models)
            if isinstance(base, ModelRefused):
                yield source, base
            else:
                by_base.setdefault(base.model, []).append(source)
        for name, adapters in by_base.items():
            if served := self._models.get(name):
                async for outcome in register(adapters, base=served.spec):
                    yield outcome
            else:
                for source in adapters:
                    yield source, ModelRefused(f"{source.root}: its base '{name}' was removed")
