"""Decode steps in compiled code are those of the model's modules."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import GemmaConfig, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from aegis.core.model import WeightsName
from aegis.engine.cpu.library import library
from aegis.engine.protocol import StepRow
from aegis.engine.transformers_engine import TransformersEngine
from tests.long_forms import first_of
from tests.unit.engine.generation import Generation, begin, step
from tests.unit.engine.images import Arena, Built, build

pytestmark = pytest.mark.skipif(library() is None, reason="not compiled here, or not for this processor")

_SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_CONFIGS = {
    "llama": LlamaConfig(**_SIZES),
    "llama-64": LlamaConfig(**_SIZES | {"hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 1}),
    "llama-3": LlamaConfig(
        **_SIZES,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "mistral": MistralConfig(**_SIZES, sliding_window=None, head_dim=64),
    "qwen2": Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_SIZES, head_dim=96),
}
_LENGTHS = (1, 7, 16, 90, 17)
TOKENS = 24


def _engine(built: Built) -> tuple[TransformersEngine, Arena]:
    arena = Arena()
    engine = TransformersEngine(arena.region)
    engine.attach(built.spec, built.base)
    return engine, arena


def _compiled(engine: TransformersEngine, built: Built) -> bool:
    return engine._models[built.spec.model].compiled is not None


def _prompts() -> list[list[int]]:
    draws = random.Random(5)
    return [[draws.randrange(1, 256) for _ in range(length)] for length in _LENGTHS]


def _begun(engine: TransformersEngine, arena: Arena, built: Built, count: int) -> list[Generation]:
    prompts = _prompts()[:count]
    return [begin(engine, arena, built, number, prompt, room=TOKENS) for number, prompt in enumerate(prompts)]


@pytest.mark.parametrize("weights", first_of(1, ["dense", "int8"]))
@pytest.mark.parametrize("packs", first_of(1, [True, False]))
@pytest.mark.parametrize("config", _CONFIGS.values(), ids=_CONFIGS)
def test_in_float32_every_token_is_transformers(
    config: PretrainedConfig, packs: bool, weights: WeightsName, tmp_path: Path
) -> None:
    built = build(config, tmp_path / "model", weights=weights, packs=packs, std=0.15)
    engine, arena = _engine(built)
    assert _compiled(engine, built) == (packs or weights == "dense")
    runs = _begun(engine, arena, built, len(_LENGTHS))
    step(engine, runs, TOKENS - 1)
    assert [run.ids for run in runs] == [built.greedy(prompt, TOKENS) for prompt in _prompts()]


def _logits(engine: TransformersEngine, built: Built, runs: list[Generation], *, compiled: bool) -> torch.Tensor:
    attached, rows = engine._models[built.spec.model], [run.row() for run in runs]
    with torch.inference_mode():
        if compiled:
            assert attached.compiled is not None
            return attached.compiled.decode(rows, engine._computing.scratch).float()
        order, logits = engine._decode_gathered(attached, rows)
    return logits[torch.tensor(order).argsort()].float()


@pytest.mark.parametrize("weights", ["dense", "int8", "int4", "int4-g32"])
@pytest.mark.parametrize("rows", first_of(2, [2, 9, 1, 5]))
def test_in_bfloat16_logits_are_as_near_to_float32_s_as_the_modules_are(
    weights: WeightsName, rows: int, tmp_path: Path
) -> None:
    built = build(_CONFIGS["qwen3"], tmp_path / "model", weights=weights, packs=True, std=0.05, dtype=torch.bfloat16)
    engine, arena = _engine(built)
    runs = _begun(engine, arena, built, rows)
    ours, theirs = (_logits(engine, built, runs, compiled=compiled) for compiled in (True, False))
    wide = built.reference.float()
    exact = torch.stack([wide(torch.tensor([[*run.prompt, *run.ids]])).logits[0, -1] for run in runs])
    off, modules_off = ((each - exact).norm() / exact.norm() for each in (ours, theirs))
    assert off < 1.25 * modules_off + 1e-3


def test_threads_change_nothing(tmp_path: Path) -> None:
    built = build(_CONFIGS["llama"], tmp_path / "model", packs=True, std=0.15)
    engine, arena = _engine(built)
    runs = _begun(engine, arena, built, 3)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(_logits(engine, built, runs, compiled=True))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)


def test_a_block_is_cleared_when_it_begins(tmp_path: Path) -> None:
    """Others gather whole blocks: what they hide has to be finite."""
    built = build(_CONFIGS["llama"], tmp_path / "model", packs=True, std=0.15)
    engine, arena = _engine(built)
    size = built.manifest.kv.block_tokens
    run = begin(engine, arena, built, 0, [3] * size, room=TOKENS)
    views = engine._models[built.spec.model].views
    fresh = int(views.units(run.blocks[1:2])[0])
    views.blocks[fresh].fill_(torch.nan)
    engine.step(built.spec.model, [run.row()])
    assert views.blocks[fresh].isfinite().all() and views.layers[0].keys[fresh, 0].abs().sum() > 0


@pytest.mark.parametrize(
    "config",
    [
        MistralConfig(**_SIZES, sliding_window=8),
        GemmaConfig(**_SIZES, head_dim=32),
        LlamaConfig(**_SIZES, hidden_act="gelu"),
        LlamaConfig(**_SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
        LlamaConfig(**_SIZES | {"hidden_size": 96}),
    ],
    ids=["window", "gemma", "gelu", "dynamic", "width"],
)
def test_what_it_does_not_know_runs_through_its_modules(config: PretrainedConfig, tmp_path: Path) -> None:
    built = build(config, tmp_path / "model", packs=True, std=0.15)
    engine, arena = _engine(built)
    assert not _compiled(engine, built)
    (run,) = _begun(engine, arena, built, 1)
    step(engine, [run], 4)
    assert run.ids == built.greedy(run.prompt, 5)


def test_rows_that_do_not_sample_are_left_out(tmp_path: Path) -> None:
    built = build(_CONFIGS["llama"], tmp_path / "model", packs=True, std=0.15)
    engine, arena = _engine(built)
    first, second = _begun(engine, arena, built, 2)
    row = first.row()
    silent = StepRow(row.request, row.tokens, row.start, row.blocks, samples=False)
    answers = engine.step(built.spec.model, [silent, second.row()])
    assert answers[0] is None and answers[1] is not None
    assert answers[1].token.id == built.greedy(second.prompt, 2)[1]
