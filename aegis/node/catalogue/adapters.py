"""Adapters among the models that are served: the bases that they belong to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from aegis.core.errors import ModelRefused, UserError
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.models.adapters.configuration import CONFIGURATION, base_of, read_configuration
from aegis.models.failures import refused
from aegis.models.sources import Source
from aegis.node.catalogue.model import CatalogueModel
from memory.budget import Budget


async def find_base(source: Source, models: Mapping[ModelId, CatalogueModel]) -> ModelSpec | ModelRefused:
    """The base of an adapter, among the models that can be served."""
    specs = {name: model.spec for name, model in models.items() if model.state != "failed"}
    try:
        said = "" if source.path is None else await asyncio.to_thread(_said, Path(source.path))
        return base_of(source.base or None, said, specs)
    except ModelRefused as refusal:
        return refused(source.root, refusal.message)
    except OSError as error:  # a directory that may not be read
        return refused(source.root, error.strerror or str(error))


def _said(directory: Path) -> str:
    if not (directory / CONFIGURATION).exists():
        raise ModelRefused(f"there is no {CONFIGURATION}, so it is not an adapter")
    return read_configuration(directory).base


def lost_base(source: Source, spec: ModelSpec, models: Mapping[ModelId, CatalogueModel]) -> ModelRefused | None:
    """Why an adapter that was made for its base cannot be run with what is there now; None if it can. Its matrices have
    the shapes of that image's layers, and are read without asking again."""
    if spec.base is None:
        return None
    base, adapter = models.get(spec.base), spec.manifest.adapter
    if base is None:
        return ModelRefused(f"{source.root}: its base '{spec.base}' was removed")
    if adapter and adapter.base != base.spec.manifest.fingerprint:
        return ModelRefused(f"{source.root}: its base '{spec.base}' became another model meanwhile; add it again")
    return None


def adapters_of(base: ModelId, models: Mapping[ModelId, CatalogueModel]) -> list[CatalogueModel]:
    return [model for model in models.values() if model.spec.base == base]


def refuse_while_adapters(base: ModelId, models: Mapping[ModelId, CatalogueModel]) -> None:
    """Raises UserError if the model is the base of others."""
    if adapters := adapters_of(base, models):
        names = ", ".join(repr(each.spec.model) for each in adapters[:3])
        message = (
            f"model '{base}' is the base of {names}{' and others' if len(adapters) > 3 else ''}; remove those first"
        )
        raise UserError(message, status=409, param="model")


def weighed(spec: ModelSpec, base: ModelSpec | None, budget: Budget) -> ModelSpec:
    """The model as it is weighed where it is asked what fits beside it: an adapter with its base, in whole pages."""
    if base is None:
        return spec
    pages = budget.weight_pages(spec.manifest.image_bytes) + budget.weight_pages(base.manifest.image_bytes)
    return replace(spec, manifest=replace(spec.manifest, image_bytes=pages * budget.page_bytes))
