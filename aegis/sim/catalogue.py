"""The models of a simulation: `--models`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from aegis.config.config import ModelSlo
from aegis.config.values import Count, Section, Size
from aegis.core.errors import UserError
from aegis.core.ids import MODEL_NAME_PATTERN, ModelId
from aegis.core.model import ModelSpec, Slo, WeightsName
from aegis.sim.files import read
from aegis.sim.shapes import MIX, SHAPES, ModelShape

_DEFAULT_SLO = Slo()
_PART = re.compile(r"(?P<name>[^:,]+)(?::(?P<count>[1-9][0-9]{0,5}))?", re.ASCII)
_KINDS = {"mix": MIX} | {name: (name,) for name in SHAPES}


@dataclass(frozen=True, slots=True)
class Catalogue:
    """`specs` are of what has weights of its own on a device; `adapters` name the one that is their base. `fetched` are
    the bytes of lazy models where they come from: of the checkpoint, whatever is made of it."""

    specs: tuple[ModelSpec, ...]
    adapters: Mapping[ModelId, ModelId] = field(default_factory=dict)
    fetched: Mapping[ModelId, int] = field(default_factory=dict)

    def names(self) -> set[ModelId]:
        """All that can be asked for."""
        return {spec.model for spec in self.specs} | set(self.adapters)


def models(
    text: str,
    *,
    asked: Iterable[ModelId] = (),
    slo: Slo = _DEFAULT_SLO,
    instead: Iterable[tuple[str, str]] = (),
) -> list[ModelSpec]:
    """The `specs` of the catalogue."""
    return [*catalogue(text, asked=asked, slo=slo, instead=instead).specs]


def catalogue(
    text: str,
    *,
    asked: Iterable[ModelId] = (),
    slo: Slo = _DEFAULT_SLO,
    instead: Iterable[tuple[str, str]] = (),
    weights: WeightsName = "dense",
    lazy: bool = False,
) -> Catalogue:
    """The value of `--models`, in order of index. `asked` are the models that the workload asks for; `weights`, and
    whether they are `lazy`, hold for those that do not say otherwise.

    `mix:80` is 80 models, of every ten six 7B, two 9B and two 13B; `qwen2.5-72b:4` four of one shape; parts are joined
    by commas. A lone part without a count is as many as the workload needs. Models are called m000, m001, ...; where
    the workload numbers them otherwise (m7, m07) its names are taken, by number, and names of its own in their order.
    A YAML file names each model itself. `instead` are pairs of a text and a shape, which models with the text in their
    names have.

    Raises UserError, one line: the part or key at fault and what was expected, or the model that is missing.
    """
    if text.endswith((".yaml", ".yml")):
        found = _from_file(Path(text), slo, weights, lazy=lazy)
        missing = sorted(set(asked) - found.names())
        if missing:
            raise UserError(f"{text}: has no model {missing[0]}, which the workload asks for")
        return found
    numbered, named = _sorted_out(asked)
    fewest = max(numbered) + 1 if numbered else len(named)
    shapes = _shapes(text, fewest)
    if len(shapes) < fewest:
        raise UserError(f"--models {text}: {len(shapes)} models, but the workload asks for {fewest}")
    if named and len(shapes) > fewest:
        raise UserError(f"--models {text}: {len(shapes)} models, but the workload names {fewest}; leave out the count")
    width = max((len(name) for name in numbered.values()), default=4) - 1
    names = named or [numbered.get(index, ModelId(f"m{index:0{width}}")) for index in range(len(shapes))]
    others = [(part, SHAPES[kind]) for part, kind in instead]
    shaped = [
        (name, next((other for part, other in others if part in name), shape))
        for name, shape in zip(names, shapes, strict=True)
    ]
    return Catalogue(
        tuple(shape.spec(name, slo, weights=weights) for name, shape in shaped),
        fetched={name: shape.weight_bytes for name, shape in shaped} if lazy else {},
    )


def _sorted_out(asked: Iterable[ModelId]) -> tuple[dict[int, ModelId], list[ModelId]]:
    """The models a workload asks for: by number if all are called m007 or so, else in order of name."""
    names = sorted(set(asked))
    if all(re.fullmatch(r"m[0-9]{1,6}", name, re.ASCII) for name in names):
        numbered = {int(name[1:]): name for name in names}
        if len(numbered) == len(names):
            return numbered, []
    return {}, names


def _shapes(text: str, fewest: int) -> list[ModelShape]:
    parts = text.split(",")
    shapes: list[ModelShape] = []
    for part in parts:
        match = _PART.fullmatch(part)
        kinds = _KINDS.get(match["name"]) if match else None
        if match is None or kinds is None or (match["count"] is None and len(parts) > 1):
            known = ", ".join(_KINDS)
            raise UserError(f"--models {text}: {part!r} should be NAME:COUNT with a name of {known}, or a .yaml file")
        count = int(match["count"] or fewest or 1)
        shapes += [SHAPES[kinds[index % len(kinds)]] for index in range(count)]
    return shapes


class _Shape(Section):
    """The figures of a model's `config.json`."""

    layers: Count
    heads: Count
    kv_heads: Count | None = None
    head_dim: Count | None = None
    hidden: Count
    intermediate: Count
    vocab: Count
    context_tokens: Count = 32768
    qkv_bias: bool = False
    tied: bool = False


class _Model(Section):
    """`base` makes it a LoRA adapter of that model, with the shape, the deadlines and everything else of it."""

    shape: str | None = None
    slo: ModelSlo = ModelSlo()
    weights: WeightsName | None = None
    lazy: bool | None = None
    base: str | None = None
    rank: Count | None = None
    size: Size | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> _Model:
        own = [name for name in ("shape", "slo", "weights", "lazy") if name in self.model_fields_set]
        if self.base is None and (self.rank or self.size):
            raise ValueError("rank and size are of adapters, which name their base")
        if self.base is not None and own:
            raise ValueError(f"{own[0]} is its base's: set it there")
        if self.base is not None and (self.rank is None) == (self.size is None):
            raise ValueError("should have one of rank and size")
        if self.base is None and self.shape is None:
            raise ValueError("should have a shape, or the base that it is an adapter of")
        return self


class _CatalogueFile(Section):
    shapes: dict[str, _Shape] = Field(default_factory=dict)
    models: dict[Annotated[str, Field(pattern=f"^{MODEL_NAME_PATTERN}$")], _Model] = Field(min_length=1)
    weights: WeightsName | None = None


def _from_file(file: Path, slo: Slo, weights: WeightsName, *, lazy: bool) -> Catalogue:
    content = read(file, _CatalogueFile)
    shapes = SHAPES | {name: _shape(name, given) for name, given in content.shapes.items()}
    own = {name: _shape_of(file, name, model, shapes) for name, model in content.models.items() if model.base is None}
    beside_bytes = dict.fromkeys(own, 0)
    adapters = {}
    for name, model in content.models.items():
        if model.base is None:
            continue
        if model.base not in own:
            raise UserError(
                f"{file}: models.{name}.base: should be a model of the file with a shape, not {model.base!r}"
            )
        adapters[ModelId(name)] = ModelId(model.base)
        beside_bytes[model.base] += model.size or own[model.base].adapter_bytes(model.rank or 0)
    specs, fetched = [], {}
    for name, shape in own.items():
        model = content.models[name]
        form, model_slo = model.weights or content.weights or weights, _own_slo(model.slo, slo)
        specs.append(shape.spec(ModelId(name), model_slo, weights=form, beside_bytes=beside_bytes[name]))
        if lazy if model.lazy is None else model.lazy:
            fetched[ModelId(name)] = shape.weight_bytes + beside_bytes[name]
    return Catalogue(tuple(specs), adapters, fetched)


def _shape_of(file: Path, name: str, model: _Model, shapes: Mapping[str, ModelShape]) -> ModelShape:
    if model.shape is None or model.shape not in shapes:
        raise UserError(f"{file}: models.{name}.shape: should be one of {', '.join(shapes)}, not {model.shape!r}")
    return shapes[model.shape]


def _own_slo(own: ModelSlo, market: Slo) -> Slo:
    return Slo(
        ttft_ns=market.ttft_ns if own.ttft_ms is None else round(own.ttft_ms * 1e6),
        tbt_ns=market.tbt_ns if own.tbt_ms is None else round(own.tbt_ms * 1e6),
        gap_ns=market.gap_ns if own.gap_ms is None else round(own.gap_ms * 1e6),
    )


def _shape(name: str, given: _Shape) -> ModelShape:
    return ModelShape(
        name=name,
        architecture="",
        layers=given.layers,
        heads=given.heads,
        kv_heads=given.kv_heads or given.heads,
        head_dim=given.head_dim or given.hidden // given.heads,
        hidden=given.hidden,
        intermediate=given.intermediate,
        vocab=given.vocab,
        context_tokens=given.context_tokens,
        qkv_bias=given.qkv_bias,
        tied=given.tied,
    )
