"""The check lets right engines pass and notices engines that are wrong in ways that matter."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec import structs

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.engine.packed_linear import packs as can_pack
from aegis.engine.protocol import Sampled, StepRow
from aegis.engine.transformers_engine import TransformersEngine
from aegis.models import weight_image
from aegis.models.self_check import MakeEngine, check
from aegis.models.sources import Source
from tests import checkpoints
from tests.registering import register

Rows = Sequence[StepRow]


class OffByOne(TransformersEngine):
    """Decodes every token one position late."""

    def step(self, model: ModelId, rows: Rows) -> list[Sampled | None]:
        late = [structs.replace(row, start=row.start + 1) if len(row.tokens) == 1 else row for row in rows]
        return super().step(model, late)


class Swapped(TransformersEngine):
    """Gives each row the blocks of the other."""

    def step(self, model: ModelId, rows: Rows) -> list[Sampled | None]:
        blocks = [row.blocks for row in reversed(rows)]
        return super().step(model, [structs.replace(row, blocks=b) for row, b in zip(rows, blocks, strict=True)])


class ShortSighted(TransformersEngine):
    """Prefills the end of the prompt alone."""

    def step(self, model: ModelId, rows: Rows) -> list[Sampled | None]:
        ends = [structs.replace(row, tokens=row.tokens[-3:]) if row.start == 0 else row for row in rows]
        return super().step(model, ends)


class Forgetful(TransformersEngine):
    """Knows nothing of earlier chunks."""

    def step(self, model: ModelId, rows: Rows) -> list[Sampled | None]:
        return super().step(model, rows) if rows[0].samples else [None]


def run(
    tmp_path: Path, model_type: str, make_engine: MakeEngine, dtype: str = "float32", *, packs: bool = False
) -> ModelSpec:
    path = checkpoints.write(tmp_path / model_type, model_type)
    source = Source(ModelId(model_type), path=str(path))
    checks = partial(check, make_engine=make_engine)
    return register(source, dtype=dtype, cache_dir=tmp_path / "cache", check=checks, packs=packs)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mistral", "gpt2", "qwen3_moe", "gpt_oss"])
def test_a_right_engine_passes(tmp_path: Path, model_type: str) -> None:
    run(tmp_path, model_type, TransformersEngine)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_no_reason_to_refuse(tmp_path: Path, dtype: str) -> None:
    run(tmp_path, "llama", TransformersEngine, dtype)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen2", "phi3", "qwen3_moe", "gpt_oss"])
def test_packed_weights_say_what_those_in_rows_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    monkeypatch.setattr(weight_image, "SMALL_WEIGHT_ELEMENTS", 1)
    if not can_pack(torch.zeros(16, 16, dtype=torch.bfloat16)):
        pytest.skip("this processor packs no such weights")
    packed = run(tmp_path, model_type, TransformersEngine, "bfloat16", packs=True).manifest.tensors
    assert any(entry.packing for entry in packed)
    looked_up = [entry for entry in packed if any("embed" in name for name in entry.names)]
    assert looked_up and not any(entry.packing for entry in looked_up)


def test_weights_are_packed_where_that_is_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones are not, and those in float32 are for several rows only."""
    spec = run(tmp_path, "llama", TransformersEngine, "bfloat16", packs=True)
    monkeypatch.setattr(weight_image, "SMALL_WEIGHT_ELEMENTS", 1)
    wide = run(tmp_path, "llama", TransformersEngine, "float32", packs=True)
    assert not any(entry.packing for entry in (*spec.manifest.tensors, *wide.manifest.tensors))


@pytest.mark.parametrize("wrong", [OffByOne, Swapped, ShortSighted, Forgetful])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_engine_is_noticed(tmp_path: Path, wrong: MakeEngine, dtype: str) -> None:
    with pytest.raises(ModelRefused, match="its output over paged KV is not what transformers computes"):
        run(tmp_path, "llama", wrong, dtype)
