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
from aegis.core.model import KvLayer
from aegis.core.request import Sampling
from aegis.engine.modules import _of_config, built_for
from aegis.engine.tensor_views import tensors_of
from aegis.engine.transformers_engine import TransformersEngine
from aegis.models.kv_probe import Probed
from tests.long_forms import first_of
from tests.unit.engine.generation import GREEDY, Generation, begin, step
from tests.unit.engine.images import Arena, Built, build

VOCAB = 199
NEW_TOKENS = 26
PROMPT_LENGTHS = (1, 15, 16, 17, 40)

_IDS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_BASE = _IDS | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_GPT = _IDS | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
_ALTERNATING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "afmoe": _BASE
    | _EXPERTS
    | {"head_dim": 24, "num_experts": 4, "sliding_window": 16, "global_attn_every_n_layers": 2},
    "apertus": _BASE,
    "cohere": _BASE,
    "cohere2": _BASE | _ALTERNATING,
    "deepseek_v3": _BASE
    | _EXPERTS
    | {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gemma2": _BASE
    | _ALTERNATING
    | {"head_dim": 32, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 32, "tie_word_embeddings": False},
    "gemma3_text": _BASE | _ALTERNATING | {"head_dim": 32, "tie_word_embeddings": False},
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": _BASE,
    "gpt_oss": _BASE | _ALTERNATING | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite": _BASE,
    "llama": _BASE,
    "mistral": _BASE | {"sliding_window": 16},
    "mixtral": _BASE | {"num_local_experts": 4, "sliding_window": None},
    "olmo2": _BASE,
    "opt": _IDS
    | {
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "word_embed_proj_dim": 64,
    },
    "phi3": _BASE,
    "qwen2": _BASE | {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16},
    "qwen3": _BASE | {"head_dim": 24},
    "qwen3_moe": _BASE | _EXPERTS | {"num_experts": 4, "head_dim": 16},
    "stablelm": _BASE,
    "starcoder2": _BASE | {"sliding_window": 16},
}
TELLING = ("afmoe", "deepseek_v3", "gemma3_text", "gpt2", "gpt_oss", "llama", "mixtral")
"""Each other one is like one of these in what it does with positions, windows and the result of attention."""
_TELLING_FIRST = [*TELLING, *(name for name in ARCHITECTURES if name not in TELLING)]
telling_ones_first = pytest.mark.parametrize("name", first_of(len(TELLING), _TELLING_FIRST))


def make(name: str, directory: Path, **options: Any) -> Built:
    return build(AutoConfig.for_model(name, **ARCHITECTURES[name]), directory, **options)


def prompts(seed: int) -> list[list[int]]:
    draws = random.Random(seed)
    return [[draws.randrange(3, VOCAB) for _ in range(length)] for length in PROMPT_LENGTHS]


def attached(*models: Built) -> tuple[TransformersEngine, Arena]:
    arena = Arena()
    engine = TransformersEngine(arena.region)
    for model in models:
        engine.attach(model.spec, model.base)
    return engine, arena


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return make("llama", tmp_path_factory.mktemp("models") / "resident")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return make("qwen3", tmp_path_factory.mktemp("models") / "visitor")


@telling_ones_first
def test_equals_transformers_beside_another_model(name: str, llama: Built, tmp_path: Path) -> None:
    built = make(name, tmp_path / name)
    engine, arena = attached(built, llama)
    mine = [begin(engine, arena, built, i, prompt, room=NEW_TOKENS) for i, prompt in enumerate(prompts(1))]
    other = [begin(engine, arena, llama, 10 + i, prompt, room=NEW_TOKENS) for i, prompt in enumerate(prompts(2))]
    for _ in range(NEW_TOKENS - 1):
        step(engine, mine)
        step(engine, other[:2])
    for run in mine:
        assert run.ids == built.greedy(run.prompt, NEW_TOKENS)
    for run in other[:2]:
        assert run.ids == llama.greedy(run.prompt, NEW_TOKENS)
    assert len({token for run in mine for token in run.ids}) > 8, "degenerate weights prove nothing"


def test_two_models_take_turns_in_the_same_weight_memory(llama: Built, qwen: Built) -> None:
    weights = np.zeros(max(len(llama.image), len(qwen.image)), dtype=np.uint8)
    arena = Arena()
    engine = TransformersEngine(arena.region)
    runs: dict[ModelId, list[Generation]] = {}
    models = (llama, qwen)
    for model in models:
        engine.attach(model.spec, weights.ctypes.data)
    for number, model in enumerate(models):
        weights[: len(model.image)] = model.image
        runs[model.spec.model] = [
            begin(engine, arena, model, 10 * number + i, prompt, room=NEW_TOKENS)
            for i, prompt in enumerate(prompts(3 + number))
        ]
    for turn in range(NEW_TOKENS - 1):
        for model in models if turn % 2 else reversed(models):
            weights.fill(0xFF)
            weights[: len(model.image)] = model.image
            step(engine, runs[model.spec.model])
    for model in models:
        for run in runs[model.spec.model]:
            assert run.ids == model.greedy(run.prompt, NEW_TOKENS)


def test_rows_of_very_different_lengths(llama: Built) -> None:
    engine, arena = attached(llama)
    draws = random.Random(5)
    lengths = [1, 400, 3, 33, 2, 64, 399, 16]
    runs = [
        begin(engine, arena, llama, i, [draws.randrange(3, VOCAB) for _ in range(length)], room=20)
        for i, length in enumerate(lengths)
    ]
    step(engine, runs, 19)
    for run in runs:
        assert run.ids == llama.greedy(run.prompt, 20)


def test_rows_leave_and_join_between_steps(llama: Built) -> None:
    engine, arena = attached(llama)
    runs: list[Generation] = []
    for i, prompt in enumerate(prompts(6)):
        runs.append(begin(engine, arena, llama, i, prompt, room=60))
        step(engine, runs[-3:], 7)
    for run in runs:
        assert run.ids == llama.greedy(run.prompt, len(run.ids))


def test_a_replay_goes_on_where_the_lost_request_was(llama: Built) -> None:
    sampling = Sampling(
        max_tokens=40,
        seed=7,
        temperature=0.9,
        top_p=0.95,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
    )
    engine, arena = attached(llama)
    prompt = prompts(7)[3]
    whole = begin(engine, arena, llama, 1, prompt, room=30, sampling=sampling)
    step(engine, [whole], 24)
    for cut in (1, 9, 20):
        replayed = begin(engine, arena, llama, 2, prompt, room=30, sampling=sampling, sent=whole.ids[:cut])
        step(engine, [replayed], 24 - cut)
        engine.stop(RequestId(2))
        assert replayed.ids == whole.ids


def test_seeded_requests_do_not_depend_on_their_batch(llama: Built) -> None:
    engine, arena = attached(llama)
    sampling = [Sampling(max_tokens=40, seed=i, temperature=0.5 + i / 4, top_k=20 * (i % 2)) for i in range(5)]
    together = [
        begin(engine, arena, llama, i, prompt, room=20, sampling=sampling[i]) for i, prompt in enumerate(prompts(8))
    ]
    step(engine, together, 15)
    for i, run in enumerate(together):
        alone = begin(engine, arena, llama, 50 + i, run.prompt, room=20, sampling=sampling[i])
        step(engine, [alone], 15)
        assert alone.ids == run.ids


def test_logprobs_are_those_of_the_raw_distribution(llama: Built) -> None:
    engine, arena = attached(llama)
    prompt = prompts(9)[3]
    sampling = Sampling(max_tokens=9, temperature=0.7, top_k=3, logprobs=4, prompt_logprobs=2)
    run = begin(engine, arena, llama, 1, prompt, room=9, sampling=sampling)
    step(engine, [run], 5)
    with torch.inference_mode():
        expected = torch.log_softmax(llama.reference(torch.tensor([[*prompt, *run.ids]])).logits[0], -1)
    assert run.first is not None
    assert [token.id for token in run.first.prompt] == prompt[1:]
    for at, token in enumerate((*run.first.prompt, *run.tokens)):
        assert token.logprob == pytest.approx(float(expected[at, token.id]), abs=1e-4)
        values, ids = expected[at].topk(len(token.top))
        assert [other for other, _ in token.top] == ids.tolist()
        assert [logprob for _, logprob in token.top] == pytest.approx(values.tolist(), abs=1e-4)
    assert [len(token.top) for token in run.first.prompt] == [2] * (len(prompt) - 1)
    assert [len(token.top) for token in run.tokens] == [4] * 6


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "gpt_oss"])
def test_bfloat16_stays_close(name: str, tmp_path: Path) -> None:
    built = make(name, tmp_path / name, std=0.05, dtype=torch.bfloat16)
    engine, arena = attached(built)
    sampling = Sampling(max_tokens=20, temperature=0.0, logprobs=0)
    runs = [begin(engine, arena, built, i, prompt, room=20, sampling=sampling) for i, prompt in enumerate(prompts(10))]
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
    arena = Arena()
    engine = TransformersEngine(arena.region.__class__(base, nbytes, 1 << 20))
    engine.attach(llama.spec, base)
    engine.detach(llama.spec.model)
    libc.munmap(ctypes.c_void_p(base), ctypes.c_size_t(nbytes))


def test_a_detached_model_can_be_attached_again(llama: Built) -> None:
    engine, arena = attached(llama)
    engine.detach(llama.spec.model)
    engine.attach(llama.spec, llama.base)
    run = begin(engine, arena, llama, 1, prompts(11)[2], room=4)
    step(engine, [run], 3)
    assert run.ids == llama.greedy(run.prompt, 4)


def test_an_image_without_some_tensor_is_refused(llama: Built) -> None:
    tensors = llama.manifest.tensors[1:]
    spec = msgspec.structs.replace(llama.spec, manifest=msgspec.structs.replace(llama.manifest, tensors=tensors))
    with pytest.raises(ModelRefused, match="lacks"):
        attached(Built(llama.reference, spec, llama.image))


_ANY = Probed((KvLayer(2, 16, 16),) * 2, torch.float32, VOCAB)
_NO_ATTENTION_INTERFACE = {
    "bloom": _IDS | {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "falcon": _IDS | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "llama4_text": _BASE | {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 96},
    "mamba": _IDS | {"hidden_size": 64, "num_hidden_layers": 2},
}


@pytest.mark.parametrize("name", _NO_ATTENTION_INTERFACE)
def test_what_cannot_run_over_paged_kv_is_refused_at_once(name: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(name, **_NO_ATTENTION_INTERFACE[name])
    with pytest.raises(ModelRefused):
        attached(build(config, tmp_path / name, probed=_ANY))


@pytest.mark.parametrize("name", ["bert", "diffllama"])  # not causal; an attention class of its own
def test_what_turns_out_to_attend_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    built = build(AutoConfig.for_model(name, **_BASE), tmp_path / name, probed=_ANY)
    engine, arena = attached(built)
    with pytest.raises(ModelRefused):
        begin(engine, arena, built, 1, [3, 4, 5], room=1, sampling=GREEDY)


def test_a_model_that_is_not_attached_can_be_detached(llama: Built) -> None:
    TransformersEngine(Arena().region).detach(llama.spec.model)


def test_what_was_prepared_serves_its_own_checkpoint_alone(llama: Built, qwen: Built) -> None:
    engine, arena = attached()
    engine.prepare(qwen.spec)
    renamed = msgspec.structs.replace(llama.spec, model=qwen.spec.model)
    engine.attach(renamed, llama.base)
    run = begin(engine, arena, Built(llama.reference, renamed, llama.image), 1, prompts(12)[2], room=4)
    step(engine, [run], 3)
    assert run.ids == llama.greedy(run.prompt, 4)
    engine.discard(qwen.spec)
    assert not engine._prepared


def test_a_configuration_that_cannot_be_read_is_refused(llama: Built, tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="cannot build it"):
        TransformersEngine(Arena().region).prepare(msgspec.structs.replace(llama.spec, directory=str(tmp_path)))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_module_is_built_as_on_the_meta_device(name: str, llama: Built, tmp_path: Path) -> None:
    config = AutoConfig.for_model(name, **ARCHITECTURES[name])
    config.save_pretrained(tmp_path)
    spec = msgspec.structs.replace(llama.spec, directory=str(tmp_path))
    with torch.device("meta"):
        expected = _of_config(AutoConfig.from_pretrained(tmp_path))
    assert shapes(built_for(spec)) == shapes(expected)


def shapes(module: torch.nn.Module) -> list[object]:
    """Of every tensor; tensors that are the same object have the same number."""
    known: dict[int, int] = {}
    return [
        (
            name,
            type(value),
            value.shape,
            value.stride(),
            value.dtype,
            value.is_meta,
            known.setdefault(id(value), len(known)),
        )
        for name, value in tensors_of(module)
    ]
