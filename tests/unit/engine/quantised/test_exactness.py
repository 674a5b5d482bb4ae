"""In float32, tokens from quantised weights are those of transformers' model with the weights they stand for."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import LlamaConfig, Qwen2Config

from aegis.core.model import WeightsName
from aegis.engine.quantised import layers
from aegis.engine.transformers_engine import TransformersEngine
from tests.long_forms import first_of
from tests.unit.engine.generation import begin, step
from tests.unit.engine.images import Arena, build

_SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TOKENS = 16


@pytest.mark.parametrize("packs", first_of(1, [True, False]))
@pytest.mark.parametrize("weights", ["int8", "int4", "int4-g32"])
@pytest.mark.parametrize(
    "config", first_of(1, [LlamaConfig(**_SIZES), Qwen2Config(**_SIZES, tie_word_embeddings=True)])
)
def test_every_token_is_the_reference_s(
    config: LlamaConfig | Qwen2Config, weights: WeightsName, packs: bool, tmp_path: Path
) -> None:
    """Prompts past the numbers of rows at which products change, in pieces, then all sequences together."""
    built = build(config, tmp_path / "model", weights=weights, packs=packs, std=0.15)
    assert any(name.rpartition(".")[2] in layers.FORMS for entry in built.manifest.tensors for name in entry.names)
    arena = Arena()
    engine = TransformersEngine(arena.region)
    engine.attach(built.spec, built.base)
    draws = random.Random(5)
    prompts = [[draws.randrange(1, 256) for _ in range(length)] for length in (1, 7, 90, 300)]  # no padding, 0, in them
    runs = [
        begin(engine, arena, built, request, prompt, room=TOKENS, cuts=[30] if len(prompt) == 90 else [])
        for request, prompt in enumerate(prompts)
    ]
    step(engine, runs, TOKENS - 1)
    for run, prompt in zip(runs, prompts, strict=True):
        assert run.ids == built.greedy(prompt, TOKENS)
