"""Specs of checkpoints and adapters, as registrars make them: with the server's type, engine and weights, an adapter
for the base that is served."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.core.model import EngineName, ModelSpec, WeightsName
from aegis.models.sources import Source
from aegis.node.catalogue.adapters import find_base
from aegis.node.catalogue.model import CatalogueModel
from aegis.node.registration import Register, RegistrationCancelled, Report

Outcome = tuple[Source, ModelSpec | ModelRefused | None]
"""None of a lazy source whose image is still to be made."""


class _Options(NamedTuple):
    """Of a registration."""

    report: Report
    unwanted: RegistrationCancelled | None
    renew: bool
    wanted: bool


class SpecMaker:
    """Makes them, whatever becomes of them; `models` are those that are served."""

    def __init__(
        self,
        register: Register,
        models: Mapping[ModelId, CatalogueModel],
        *,
        dtype: str,
        engine: EngineName,
        ranks: int,
        weights: WeightsName,
        cache_dir: Path,
        limit_bytes: int,
    ) -> None:
        self._registering = register
        self._models = models
        self._dtype = dtype
        self._engine: EngineName = engine
        self._ranks = ranks
        self._weights: WeightsName = weights
        self._cache_dir = cache_dir
        self._limit_bytes = limit_bytes

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
        options = _Options(report, unwanted, renew, wanted)
        if alone:
            async for outcome in self._made(alone, options):
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
                async for outcome in self._made(adapters, options, served.spec):
                    yield outcome
            else:
                for source in adapters:
                    yield source, ModelRefused(f"{source.root}: its base '{name}' was removed")

    def _made(
        self, sources: Sequence[Source], options: _Options, base: ModelSpec | None = None
    ) -> AsyncIterator[Outcome]:
        return self._registering(
            sources,
            dtype=self._dtype,
            engine=self._engine,
            ranks=self._ranks,
            weights=self._weights,
            cache_dir=self._cache_dir,
            limit_bytes=self._limit_bytes,
            report=options.report,
            unwanted=options.unwanted,
            renew=options.renew,
            wanted=options.wanted,
            base=base,
        )
