"""Registers a model in the test's own process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aegis.core.model import ModelSpec
from aegis.models import registry
from aegis.models.sources import Source
from aegis.models.terms import Terms


def register(source: Source, *, dtype: str, cache_dir: Path, **how: Any) -> ModelSpec | None:
    """`how` are further terms, and options of `registry.register`."""
    terms = {name: how.pop(name) for name in Terms.__struct_fields__ if name in how}
    return registry.register(source, Terms(str(cache_dir), dtype, **terms), **how)
