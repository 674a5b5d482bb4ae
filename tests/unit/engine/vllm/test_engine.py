from __future__ import annotations

import ctypes
import mmap
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoConfig

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId, RequestId
from aegis.core.request import Sampling
from aegis.engine.engines import Engines
from aegis.engine.passes import PASS_TOKENS
from aegis.engine.protocol import StepRow
from aegis.engine.vllm.version import refusal
from tests.unit.engine.generation import GREEDY, Generation, begin, step
from tests.unit.engine.images import Arena, Built, build

if reason := refusal():
    pytest.skip(reason, allow_module_level=True)

from aegis.engine.vllm.engine import VllmEngine

VOCAB = 199
NEW_TOKENS = 40
PROMPT_LENGTHS = (1, 31, 32, 33, 70)
_SLIDING = {"sliding_window": 16}
_ALTERNATING = _SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "cohere": {},
    "gemma2": _ALTERNATING | {"query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0},
    "gemma3_text": _ALTERNATING | {"tie_word_embeddings": False},
    "glm4": {},
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "granite": {},
    "llama": {},
    "mistral": _SLIDING,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 128},
    "phi3": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 64},
    "stablelm": {},
}
_BASE = {
    "vocab_size": VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}


def make(name: str, directory: Path, **options: Any) -> Built:
    return build(AutoConfig.for_model(name, **(_BASE | ARCHITECTURES.get(name, {}))), directory, **options)


def prompts(seed: int) -> list[list[int]]:
    draws = random.Random(seed)
    return [[draws.randrange(3, VOCAB) for _ in range(length)] for length in PROMPT_LENGTHS]


def arena() -> Arena:
    """Its slabs are no multiple of any block."""
    return Arena(slab_bytes=600_004, slabs=60)


def attached(*models: Built) -> tuple[VllmEngine, Arena]:
    memory = arena()
    engine = VllmEngine(memory.region)
    for model in models:
        engine.attach(model.spec, model.base)
    return engine, memory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return make("llama", tmp_path_factory.mktemp("models") / "resident", engine="vllm")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return make("qwen3", tmp_path_factory.mktemp("models") / "visitor", engine="vllm")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equals_transformers_beside_another_model(name: str, llama: Built, tmp_path: Path) -> None:
    built = make(name, tmp_path / name, engine="vllm")
    engine, memory = attached(built, llama)
    cuts = ((), (), (16,), (32,), (5, 40))
    mine = [begin(engine, memory, built, i, p, room=NEW_TOKENS, cuts=cuts[i]) for i, p in enumerate(prompts(1))]
    other = [begin(engine, memory, llama, 10 + i, prompt, room=NEW_TOKENS) for i, prompt in enumerate(prompts(2))]
    for _ in range(NEW_TOKENS - 1):
        step(engine, mine)
        step(engine, other[:2])
    for run in mine:
        assert run.ids == built.greedy(run.prompt, NEW_TOKENS)
    for run in other[:2]:
        assert run.ids == llama.greedy(run.prompt, NEW_TOKENS)
    assert len({token for run in mine for token in run.ids}) > 4, "degenerate weights prove nothing"


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "llama"])
def test_a_batchs_third_step_and_those_after_it_run_no_modules(name: str, tmp_path: Path) -> None:
    """Those of another size do, twice, and those of the first size still do not."""
    built = make(name, tmp_path / name, engine="vllm")
    engine, memory = attached(built)
    runs = [begin(engine, memory, built, i, prompt, room=NEW_TOKENS) for i, prompt in enumerate(prompts(7))]
    called: list[bool] = []
    ran = [0]
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: ran.__setitem__(0, ran[0] + 1))
    for rows in (3, 3, 3, 3, 5, 5, 5, 3, 5):
        ran[0] = 0
        step(engine, runs[:rows])
        called.append(ran[0] > 0)
    hook.remove()
    assert called == [True, True, False, False, True, True, False, False, False]
    for run in runs:
        assert run.ids == built.greedy(run.prompt, len(run.ids))


def test_equals_transformers_where_rows_are_not_of_eights(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **(_BASE | {"hidden_size": 132}))
    built = build(config, tmp_path / "odd", engine="vllm")
    engine, memory = attached(built)
    run = begin(engine, memory, built, 1, prompts(11)[3], room=NEW_TOKENS)
    step(engine, [run], NEW_TOKENS - 1)
    assert run.ids == built.greedy(run.prompt, NEW_TOKENS)


def test_a_step_of_several_passes_equals_transformers(llama: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PASS_TOKENS, "cpu", 8)
    engine, memory = attached(llama)
    runs = [begin(engine, memory, llama, i, prompt, room=NEW_TOKENS) for i, prompt in enumerate(prompts(12))]
    joining = Generation(llama.spec.model, RequestId(9), prompts(13)[4], memory.take(llama.manifest.kv, 90))
    engine.start(joining.model, joining.request, joining.prompt, (), GREEDY)
    rows = [
        runs[0].row(),
        StepRow(joining.request, joining.prompt, 0, joining.blocks),
        *(run.row() for run in runs[1:]),
    ]
    made = engine.step(llama.spec.model, rows)
    for run, sampled in zip([runs[0], joining, *runs[1:]], made, strict=True):
        assert sampled is not None
        run.tokens.append(sampled.token)
    step(engine, [*runs, joining], 5)
    for run in (*runs, joining):
        assert run.ids == llama.greedy(run.prompt, len(run.ids))


def test_models_take_turns_in_the_same_weight_memory_while_kv_leaves_and_returns(llama: Built, qwen: Built) -> None:
    weights = np.zeros(max(len(llama.image), len(qwen.image)), dtype=np.uint8)
    memory, models = arena(), (llama, qwen)
    engine = VllmEngine(memory.region)
    runs: dict[ModelId, list[Generation]] = {}
    for model in models:
        engine.attach(model.spec, weights.ctypes.data)
    for number, model in enumerate(models):
        weights[: len(model.image)] = model.image
        asked = enumerate(prompts(3 + number))
        runs[model.spec.model] = [begin(engine, memory, model, 10 * number + i, p, room=NEW_TOKENS) for i, p in asked]
    for turn in range(NEW_TOKENS - 1):
        for model in models if turn % 2 else reversed(models):
            weights.fill(0xFF)
            weights[: len(model.image)] = model.image
            step(engine, runs[model.spec.model])
            if turn % 13 == 5:
                for run in runs[model.spec.model]:
                    run.blocks = memory.move(model.manifest.kv, run.blocks)
    for model in models:
        for run in runs[model.spec.model]:
            assert run.ids == model.greedy(run.prompt, NEW_TOKENS)


def test_what_one_engine_prefilled_another_decodes(llama: Built) -> None:
    (prefill, source), (decode, target) = attached(llama), attached(llama)
    for i, prompt in enumerate(prompts(5)):
        run = begin(prefill, source, llama, i, prompt, room=NEW_TOKENS)
        target.take(llama.manifest.kv, 33)  # so that blocks lie elsewhere
        blocks = target.take(llama.manifest.kv, len(prompt) + NEW_TOKENS)
        for mine, theirs in zip(run.blocks, blocks, strict=True):
            target.content(llama.manifest.kv, theirs)[:] = source.content(llama.manifest.kv, mine)
        run.blocks = blocks
        decode.start(llama.spec.model, RequestId(i), prompt, run.ids, Sampling(max_tokens=NEW_TOKENS, temperature=0.0))
        step(decode, [run], NEW_TOKENS - 1)
        assert run.ids == llama.greedy(prompt, NEW_TOKENS)


def test_both_engines_serve_in_one_process(llama: Built, tmp_path: Path) -> None:
    theirs = make("qwen2", tmp_path / "theirs")
    memory = arena()
    engine = Engines(memory.region, device="cpu", first="transformers")
    runs: dict[str, list[Generation]] = {}
    for number, model in enumerate((llama, theirs)):
        engine.attach(model.spec, model.base)
        asked = enumerate(prompts(6 + number))
        runs[model.spec.model] = [begin(engine, memory, model, 10 * number + i, p, room=20) for i, p in asked]
    for _ in range(19):
        step(engine, runs[llama.spec.model])
        step(engine, runs[theirs.spec.model])
    for model in (llama, theirs):
        assert [run.ids for run in runs[model.spec.model]] == [
            model.greedy(run.prompt, 20) for run in runs[model.spec.model]
        ]
    assert engine.initialisations == 2
    engine.detach(llama.spec.model)


@pytest.mark.parametrize("pass_tokens", [8, 512])
def test_logprobs_are_those_of_the_raw_distribution(
    llama: Built, pass_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PASS_TOKENS, "cpu", pass_tokens)
    engine, memory = attached(llama)
    prompt = prompts(9)[3]
    sampling = Sampling(max_tokens=9, temperature=0.7, top_k=3, logprobs=4, prompt_logprobs=2)
    run = begin(engine, memory, llama, 1, prompt, room=9, sampling=sampling)
    step(engine, [run], 5)
    with torch.inference_mode():
        expected = torch.log_softmax(llama.reference(torch.tensor([[*prompt, *run.ids]])).logits[0], -1)
    assert run.first is not None
    assert [token.id for token in run.first.prompt] == prompt[1:]
    for at, token in enumerate((*run.first.prompt, *run.tokens)):
        assert token.logprob == pytest.approx(float(expected[at, token.id]), abs=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2"])
def test_bfloat16_stays_close(name: str, tmp_path: Path) -> None:
    built = make(name, tmp_path / name, std=0.05, dtype=torch.bfloat16, engine="vllm")
    engine, memory = attached(built)
    sampling = Sampling(max_tokens=20, temperature=0.0, logprobs=0)
    runs = [begin(engine, memory, built, i, prompt, room=20, sampling=sampling) for i, prompt in enumerate(prompts(10))]
    step(engine, runs, 19)
    for run in runs:
        with torch.inference_mode():
            logits = built.reference(torch.tensor([[*run.prompt, *run.ids]]), use_cache=False).logits[0].float()
        expected = torch.log_softmax(logits, -1)
        for at, token in enumerate(run.tokens, len(run.prompt) - 1):
            assert token.logprob == pytest.approx(float(expected[at, token.id]), abs=0.15)


def test_attaching_touches_no_byte_of_weights_or_kv(llama: Built) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    nbytes = 64 << 20
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    base = libc.mmap(None, nbytes, 0, flags, -1, 0)  # no access: a read or write would end the process
    engine = VllmEngine(arena().region.__class__(base, nbytes, 1 << 20))
    engine.prepare(llama.spec)
    engine.attach(llama.spec, base)
    engine.detach(llama.spec.model)
    libc.munmap(ctypes.c_void_p(base), ctypes.c_size_t(nbytes))


def test_an_image_without_some_tensor_is_refused(llama: Built) -> None:
    tensors = llama.manifest.tensors[1:]
    spec = msgspec.structs.replace(llama.spec, manifest=msgspec.structs.replace(llama.manifest, tensors=tensors))
    with pytest.raises(ModelRefused, match="lacks"):
        attached(Built(llama.reference, spec, llama.image))


REFUSED = {
    "olmo2": ({}, "would run transformers'"),
    "llama": ({"head_dim": 48}, "48 dimensions; vLLM has kernels for 32"),
    "mamba": ({}, "MambaMixer; only attention"),
    "qwen2_moe": ({"num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}, "experts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    changes, reason = REFUSED[name]
    with pytest.raises(ModelRefused, match=reason):
        build(AutoConfig.for_model(name, **(_BASE | changes)), tmp_path / name, engine="vllm")
