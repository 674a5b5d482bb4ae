"""The models of a simulation: `--models`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field

from aegis.config.config import ModelSlo
from aegis.config.values import Count, Section
from aegis.core.errors import UserError
from aegis.core.ids import MODEL_NAME_PATTERN, ModelId
from aegis.core.model import ModelSpec, Slo
from aegis.sim.files import read
from aegis.sim.shapes import MIX, SHAPES, ModelShape

_DEFAULT_SLO = Slo()
_PART = re.compile(r"(?P<name>[^:,]+)(?::(?P<count>[1-9][0-9]{0,5}))?", re.ASCII)
_KINDS = {"mix": MIX} | {name: (name,) for name in SHAPES}


def models(
    text: str,
    *,
    asked: Iterable[ModelId] = (),
    slo: Slo = _DEFAULT_SLO,
    instead: Iterable[tuple[str, str]] = (),
) -> list[ModelSpec]:
    """The value of `--models`, in order of index. `asked` are the models that the workload asks for.

    `mix:80` is 80 models, of every ten six 7B, two 9B and two 13B; `qwen2.5-72b:4` four of one shape; parts are joined
    by commas. A lone part without a count is as many as the workload needs. Models are called m000, m001, ...; where
    the workload numbers them otherwise (m7, m07) its names are taken, by number, and names of its own in their order.
    A YAML file names each model itself. `instead` are pairs of a text and a shape, which models with the text in their
    names have.

    Raises UserError, one line: the part or key at fault and what was expected, or the model that is missing.
    """
    if text.endswith((".yaml", ".yml")):
        specs = _from_file(Path(text), slo)
        missing = sorted(set(asked) - {spec.model for spec in specs})
        if missing:
            raise UserError(f"{text}: has no model {missing[0]}, which the workload asks for")
        return specs
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
    return [
        next((other for part, other in others if part in name), shape).spec(name, slo)
        for name, shape in zip(names, shapes, strict=True)
    ]


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
    shape: str
    slo: ModelSlo = ModelSlo()


class _CatalogueFile(Section):
    shapes: dict[str, _Shape] = Field(default_factory=dict)
    models: dict[Annotated[str, Field(pattern=f"^{MODEL_NAME_PATTERN}$")], _Model] = Field(min_length=1)


def _from_file(file: Path, slo: Slo) -> list[ModelSpec]:
    content = read(file, _CatalogueFile)
    shapes = SHAPES | {name: _shape(name, given) for name, given in content.shapes.items()}
    specs = []
    for name, model in content.models.items():
        if model.shape not in shapes:
            raise UserError(f"{file}: models.{name}.shape: should be one of {', '.join(shapes)}, not {model.shape!r}")
        specs.append(shapes[model.shape].spec(ModelId(name), _own_slo(model.slo, slo)))
    return specs


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
