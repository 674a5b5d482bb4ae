"""Images of served models that are damaged on disk, or have left it: they are made again from their checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.models.sources import Source
from aegis.node.catalogue.model import CatalogueModel
from aegis.node.registration import RegistrarNotStarted, Report
from aegis.process.tasks import watched
from aegis.telemetry.logs import log

_logger = logging.getLogger(__name__)

_RENEWALS_MAX = 10
"""An image that is damaged more often is not trusted any more."""

AGAIN_S = 5.0
"""Until an image is made again for which no process could be started."""


class Served(Protocol):
    """The catalogue, as it is needed here."""

    def models(self) -> Mapping[str, CatalogueModel]: ...

    def make_again(
        self, sources: Sequence[Source], report: Report
    ) -> AsyncIterator[tuple[Source, ModelSpec | ModelRefused | None]]:
        """Makes images of the sources, even if there are some."""
        ...

    async def supply_again(self, spec: ModelSpec) -> None:
        """To every machine that had a damaged one. Raises ModelRefused."""
        ...

    def renewed(self, model: CatalogueModel) -> None:
        """The model's image is whole again."""
        ...

    def waits_again(self, model: CatalogueModel, refusal: str) -> None:
        """The model's image cannot be made now; it waits for the next request that wants it."""
        ...

    def failed(self, model: ModelId, reason: str) -> None:
        """The model cannot be served any more."""
        ...


class ImageRenewals:
    """The images of one catalogue that are to be made again."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._damaged: dict[ModelId, CatalogueModel] = {}  # whose images are to be made again
        self._renewer: asyncio.Task[None] | None = None

    def begin(self, model: CatalogueModel, reason: str) -> None:
        """Unless it is being made again already."""
        if model.renewing:
            return
        name = model.spec.model
        if model.has_left:
            log(_logger, logging.INFO, "model that has left the disk is fetched again", {"model": name})
            model.damage, model.detail = "it has left the disk", "it has left the disk; it is fetched again"
        else:
            model.renewals += 1
            if model.renewals > _RENEWALS_MAX:
                reason = f"{reason} again and again; see to the disk, remove the model and add it again"
                self._served.failed(name, reason)
                return
            log(_logger, logging.WARNING, "weight image is made again", {"model": name, "reason": reason})
            model.damage, model.detail = reason, f"{reason}; it is being made again"
        model.renewing, self._damaged[name] = True, model
        if self._renewer is None:
            self._renewer = watched(self._renew())

    async def _renew(self) -> None:
        """In one process for all that are damaged by then: a disk that loses one image may lose them all."""
        while self._damaged:
            models, self._damaged = list(self._damaged.values()), {}
            postponed: list[CatalogueModel] = []
            outcomes = self._served.make_again([model.source for model in models], self._report)
            async for source, outcome in outcomes:
                assert outcome is not None, "all were wanted"
                model = next(model for model in models if model.source is source)
                if isinstance(outcome, RegistrarNotStarted) and not model.source.lazy:
                    log(_logger, logging.WARNING, "weight image is made again later", {"reason": outcome.message})
                    postponed.append(model)
                else:
                    await self._renewed(model, outcome)
            if postponed:
                await asyncio.sleep(AGAIN_S)
                self._damaged |= {model.spec.model: model for model in postponed if self._is_served(model)}
        self._renewer = None

    def _is_served(self, model: CatalogueModel) -> bool:
        return self._served.models().get(model.spec.model) is model

    def _report(self, model: ModelId, text: str) -> None:
        found = self._served.models().get(model)
        if found and found.renewing:
            found.detail = f"{found.damage}; it is being made again: {text}"

    async def _renewed(self, model: CatalogueModel, outcome: ModelSpec | ModelRefused) -> None:
        name = model.spec.model
        if isinstance(outcome, ModelSpec) and outcome.manifest == model.spec.manifest:
            try:
                await self._served.supply_again(outcome)
            except ModelRefused as refused:
                outcome = refused
        model.renewing = False
        if not self._is_served(model):
            return
        if isinstance(outcome, ModelRefused) and model.source.lazy:
            self._served.waits_again(model, outcome.message)
        elif isinstance(outcome, ModelRefused):
            self._served.failed(name, f"{model.damage} and cannot be made again: {outcome.message}")
        elif outcome.manifest != model.spec.manifest:
            why = "its checkpoint has changed meanwhile; remove the model and add it again"
            self._served.failed(name, f"{model.damage} and cannot be made again: {why}")
        else:
            log(_logger, logging.WARNING, "weight image was made again", {"model": name})
            model.detail = ""
            self._served.renewed(model)
