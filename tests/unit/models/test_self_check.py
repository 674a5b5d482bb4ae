"""The check lets right engines pass and notices engines that are wrong in ways that matter."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId, RequestId
from aegis.engine.block_table import BlockTable
from aegis.engine.protocol import Row, Sampled
from aegis.engine.transformers_engine import TransformersEngine
from aegis.models.registry import register
from aegis.models.self_check import MakeEngine, check
from aegis.models.sources import Source
from tests import checkpoints


class OffByOne(TransformersEngine):
    """Decodes every token one position late."""

    def decode(self, model: ModelId, rows: Sequence[Row]) -> list[Sampled]:
        return super().decode(model, [structs.replace(row, position=row.position + 1) for row in rows])


class Swapped(TransformersEngine):
    """Gives each row the blocks of the other."""

    def decode(self, model: ModelId, rows: Sequence[Row]) -> list[Sampled]:
        blocks = [row.blocks for row in reversed(rows)]
        return super().decode(model, [structs.replace(row, blocks=b) for row, b in zip(rows, blocks, strict=True)])


class ShortSighted(TransformersEngine):
    """Prefills the end of the prompt alone."""

    def prefill(
        self, model: ModelId, request: RequestId, tokens: Sequence[int], blocks: BlockTable, start: int = 0
    ) -> Sampled:
        return super().prefill(model, request, tokens[-3:], blocks)


class Forgetful(TransformersEngine):
    """Knows nothing of earlier chunks."""

    def extend(self, model: ModelId, tokens: Sequence[int], blocks: BlockTable, start: int) -> bool:
        return True


def run(tmp_path: Path, model_type: str, make_engine: MakeEngine, dtype: str = "float32") -> None:
    path = checkpoints.write(tmp_path / model_type, model_type)
    source = Source(ModelId(model_type), path=str(path))
    register(source, dtype=dtype, cache_dir=tmp_path / "cache", check=partial(check, make_engine=make_engine))


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "mistral", "gpt2", "qwen3_moe", "gpt_oss"])
def test_a_right_engine_passes(tmp_path: Path, model_type: str) -> None:
    run(tmp_path, model_type, TransformersEngine)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_no_reason_to_refuse(tmp_path: Path, dtype: str) -> None:
    run(tmp_path, "llama", TransformersEngine, dtype)


@pytest.mark.parametrize("wrong", [OffByOne, Swapped, ShortSighted, Forgetful])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_engine_is_noticed(tmp_path: Path, wrong: MakeEngine, dtype: str) -> None:
    with pytest.raises(ModelRefused, match="its output over paged KV is not what transformers computes"):
        run(tmp_path, "llama", wrong, dtype)
