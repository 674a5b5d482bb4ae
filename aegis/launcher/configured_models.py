"""The models that a configuration names."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from aegis.config.config import Config, ModelEntry, ModelSlo
from aegis.config.keyring import limits_of
from aegis.config.paths import refusing
from aegis.core.clock import NS_PER_MS
from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from aegis.core.model import Slo
from aegis.launcher.live_market import slo_of
from aegis.models.cache import default_cache_dir
from aegis.models.remote.address import parse
from aegis.models.sources import Source, adapter_terms, read_sources


def sources_of(config: Config, *, demo: bool) -> list[Source]:
    """The models that the configuration names, in order, with those of the demo market where it is wanted. Raises
    UserError."""
    sources = [_source(ModelId(name), entry, config) for name, entry in config.models.items()]
    sources += read_sources(config.sources, default_slo=slo_of(config))
    if demo:
        from aegis.models.demo.market import demo_models

        sources += demo_models(default_cache_dir(), slo=slo_of(config))
    names = [source.model for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two models are named '{name}'; rename one", param="models")
    return sources


def _refuse_bad(url: str, where: str) -> None:
    """Raises UserError."""
    try:
        parse(url)
    except UserError as error:
        raise UserError(f"{where}: {error.message}", param="models") from None


def _source(model: ModelId, entry: ModelEntry, config: Config) -> Source:
    ttft_ms = entry.slo.ttft_ms or config.slo.ttft_ms
    tbt_ms = entry.slo.tbt_ms or config.slo.tbt_ms
    gap_ms = entry.slo.gap_ms or config.slo.gap_ms
    slo = Slo(round(ttft_ms * NS_PER_MS), round(tbt_ms * NS_PER_MS), round(gap_ms * NS_PER_MS))
    limits = limits_of(entry.limits)
    if entry.url:
        _refuse_bad(entry.url, f"models.{model}.url")
    terms = (entry.dtype, entry.pin, entry.engine, entry.priority, limits)
    pace = entry.pace or config.server.pace  # so that one that is taken away changes the model, too
    more = (entry.url, entry.lazy, entry.weights)
    source = replace(Source(model, None, entry.hub, slo, *terms, *more), pace=pace, base=entry.base)
    with refusing(f"models.{model}.path", entry.path or ""):
        path = str(Path(entry.path).expanduser().resolve()) if entry.path else None
        return adapter_terms(f"models.{model}", replace(source, path=path), own_slo=entry.slo != ModelSlo())
