"""A GGUF file becomes the model that transformers has of the same weights, to the bit; what cannot be is refused."""

from __future__ import annotations

import math
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from transformers import PreTrainedModel

from aegis.core.errors import ModelRefused
from aegis.core.ids import ModelId
from aegis.core.model import ModelSpec
from aegis.engine.quantised.layers import FORMS
from aegis.engine.transformers_engine import TransformersEngine
from aegis.models import self_check
from aegis.models.checkpoint import open_checkpoint
from aegis.models.fingerprint import fingerprint
from aegis.models.sources import Source
from tests import checkpoints, gguf_files
from tests.long_forms import first_of
from tests.registering import register
from tests.unit.models.quantised.served import answers_as

WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
"""K-quants have blocks of 256 elements."""

PROMPT = [[3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19, 71, 69, 39, 93, 75, 10, 58]]

Changes = dict[str, Any]
Made = tuple[str, str, Changes]

FILES: dict[str, Made] = {
    "llama-F32": ("llama", "F32", {}),
    "llama-F16": ("llama", "F16", {}),
    "llama-BF16": ("llama", "BF16", {}),
    "llama-Q8_0": ("llama", "Q8_0", {}),
    "llama-Q4_0": ("llama", "Q4_0", {}),
    "llama-Q4_1": ("llama", "Q4_1", {}),
    "llama-Q4_K": ("llama", "Q4_K", WIDE),
    "llama-Q5_K": ("llama", "Q5_K", WIDE),
    "llama-Q6_K": ("llama", "Q6_K", WIDE),
    "llama-tied": ("llama", "Q8_0", {"tie_word_embeddings": True}),
    "llama-biased": ("llama", "Q8_0", {"attention_bias": True, "mlp_bias": True}),
    "mixtral-Q8_0": ("mixtral", "Q8_0", {}),
    "qwen2-F16": ("qwen2", "F16", {}),
    "qwen2-Q8_0": ("qwen2", "Q8_0", {}),
    "qwen2-Q4_0": ("qwen2", "Q4_0", {}),
    "qwen2-Q4_K": ("qwen2", "Q4_K", WIDE),
    "qwen3-Q5_0": ("qwen3", "Q5_0", {}),
    "qwen3_moe-Q5_1": ("qwen3_moe", "Q5_1", {"norm_topk_prob": True}),
    "gemma-Q8_0": ("gemma", "Q8_0", {}),
    "gemma2-Q4_0": ("gemma2", "Q4_0", {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}),
    "gemma3-Q8_0": ("gemma3_text", "Q8_0", {"num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": 16}),
    "granite-Q8_0": (
        "granite",
        "Q8_0",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    ),
    "olmo2-Q8_0": ("olmo2", "Q8_0", {}),
    "phi3-Q8_0": ("phi3", "Q8_0", {"sliding_window": 8}),
    "smollm3-Q8_0": ("smollm3", "Q8_0", {"num_hidden_layers": 5}),
}

HEAD_HALF = 8
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def llama3_factors(theta: float) -> list[float]:
    """As llama.cpp's converter has them of Llama 3.1's configuration."""
    factors = []
    for i in range(HEAD_HALF):
        wave = 2 * math.pi * theta ** (i / HEAD_HALF)
        if wave < 8192 / 4:
            factors.append(1.0)
        elif wave > 8192:
            factors.append(8.0)
        else:
            smooth = (8192 / wave - 1) / 3
            factors.append(1 / ((1 - smooth) / 8 + smooth))
    assert 1.0 < sorted(set(factors))[1] < 8.0 or len(set(factors)) == 2
    return factors


ROPES: dict[str, tuple[Changes, dict[str, Any], dict[str, list[float]]]] = {
    "theta": ({"rope_theta": 777.0}, {}, {}),
    "linear": (
        {"rope_type": "linear", "factor": 3.0},
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 3.0},
        {},
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 64,
        },
        {},
    ),
    "llama3": (
        {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3},
        {},
        {"rope_freqs.weight": llama3_factors(500_000.0)},
    ),
    "factors": (
        {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
            "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
            "attention_factor": 1.0,
            "original_max_position_embeddings": 256,
        },
        {},
        {"rope_freqs.weight": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5]},
    ),
}


def registered(file: Path, dtype: str = "float32", **options: Any) -> tuple[ModelSpec, PreTrainedModel]:
    """The model that was made of it, and compared with what the engine says."""
    models = list[PreTrainedModel]()

    def check(spec: ModelSpec, model: PreTrainedModel) -> None:
        self_check.check(spec, model, TransformersEngine)
        models.append(model)

    cache = file.parent / "cache"
    spec = register(Source(ModelId("m"), path=str(file)), dtype=dtype, cache_dir=cache, check=check, **options)
    return spec, models[0]


@pytest.mark.parametrize("name", first_of(10, list(FILES)))
def test_a_file_is_the_model_of_its_weights(name: str, tmp_path: Path) -> None:
    model_type, kind, changes = FILES[name]
    expected = gguf_files.write(tmp_path / "m.gguf", model_type, kind, **changes)
    spec, found = registered(tmp_path / "m.gguf")
    weights = expected.state_dict()
    assert found.state_dict().keys() == weights.keys()
    assert [name for name, weight in found.state_dict().items() if not torch.equal(weight, weights[name])] == []
    with torch.inference_mode():
        ours, theirs = (model(torch.tensor(PROMPT)).logits for model in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    assert spec.manifest.eos_token_ids == (1,)
    runs_as = {"Q4_0": "int4", "Q8_0": "int8"}.get(kind, "float32")
    has_experts = model_type in ("mixtral", "qwen3_moe") and runs_as != "float32"
    assert spec.note == f"{kind} file, runs as {runs_as}" + (" and float32" if has_experts else "")
    forms = {name.rpartition(".")[2] for entry in spec.manifest.tensors for name in entry.names} & FORMS.keys()
    assert forms == {"Q4_0": {"int4_rows"}, "Q8_0": {"int8_rows"}}.get(kind, set())


@pytest.mark.parametrize("name", ROPES)
def test_rotary_frequencies_are_the_file_s(name: str, tmp_path: Path) -> None:
    parameters, metadata, rows = ROPES[name]
    changes = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0} | parameters}
    expected = gguf_files.write(tmp_path / "m.gguf", "llama", "F32", metadata=metadata, rows=rows, **changes)
    _, found = registered(tmp_path / "m.gguf")
    assert found.config.rope_parameters["rope_type"] == changes["rope_parameters"]["rope_type"]
    with torch.inference_mode():
        ours, theirs = (model(torch.tensor(PROMPT * 3).reshape(1, -1)).logits for model in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_phi3_has_factors_for_short_and_long_texts(tmp_path: Path) -> None:
    short, long = [1.0 + i / 8 for i in range(HEAD_HALF)], [2.0 + i for i in range(HEAD_HALF)]
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": short, "long_factor": long}
    metadata = {"phi3.rope.scaling.original_context_length": 64, "phi3.rope.scaling.attn_factor": 1.25}
    rows = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    expected = gguf_files.write(
        tmp_path / "m.gguf",
        "phi3",
        "F32",
        metadata=metadata,
        rows=rows,
        rope_parameters=rope | {"attention_factor": 1.25, "original_max_position_embeddings": 64},
        original_max_position_embeddings=64,
    )
    spec, found = registered(tmp_path / "m.gguf")
    assert spec.manifest.context_tokens == 64
    with torch.inference_mode():
        ours, theirs = (model(torch.tensor(PROMPT)).logits for model in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("model_type", "kind", "dtype"),
    [
        ("llama", "F32", "float32"),
        ("llama", "F16", "float16"),
        ("llama", "BF16", "bfloat16"),
        ("gemma", "Q5_0", "bfloat16"),  # whose norms lose no more than that when one is taken off
    ],
)
def test_a_file_runs_in_the_type_that_is_nearest(model_type: str, kind: str, dtype: str, tmp_path: Path) -> None:
    expected = gguf_files.write(tmp_path / "m.gguf", model_type, kind).state_dict()
    spec, found = registered(tmp_path / "m.gguf", "auto")
    assert spec.note == f"{kind} file, runs as {dtype}"
    assert spec.manifest.dtype == dtype
    rounded = {name: weight.to(getattr(torch, dtype)) for name, weight in expected.items()}
    assert all(torch.equal(weight, rounded[name]) for name, weight in found.state_dict().items())


def test_an_image_is_found_again_and_made_anew_for_another_header(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    gguf_files.write(file, "llama", "F16")
    said = list[str]()
    report = lambda text, _: said.append(text)  # noqa: E731
    first, _ = registered(file, report=report)
    again = register(Source(ModelId("m"), path=str(file)), dtype="float32", cache_dir=tmp_path / "cache", report=report)
    assert again == first and said.count("loading the weights") == 1
    gguf_files.write(file, "llama", "F16", seed=1)
    assert registered(file, report=report)[0].directory != first.directory


def test_the_header_counts_in_the_name_of_an_image(tmp_path: Path) -> None:
    """Size and time of a file may be the same by chance."""
    gguf_files.write(tmp_path / "m.gguf", "llama", "F16")
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.gguf
    other = structs.replace(checkpoint, gguf=replace(checkpoint.gguf, header_bytes=24))
    assert fingerprint(checkpoint, "auto") != fingerprint(other, "auto")


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_integers_of_a_file_answer_as_its_weights(kind: str, tmp_path: Path) -> None:
    reference = gguf_files.write(tmp_path / "m.gguf", "llama", kind)
    spec, _ = registered(tmp_path / "m.gguf", packs=True)
    dense, _ = registered(tmp_path / "m.gguf", ranks=2)
    assert spec.manifest.image_bytes < 2 * dense.manifest.image_bytes  # of each rank
    assert dense.note == f"{kind} file, runs as float32"
    answers_as(spec, reference)


def test_memory_is_asked_for_the_numbers_that_weights_become(tmp_path: Path) -> None:
    weighed = list[int]()
    model = gguf_files.write(tmp_path / "m.gguf", "llama", "Q4_0")
    registered(tmp_path / "m.gguf", weigh=weighed.append)
    assert weighed == [2 * sum(weight.numel() for weight in model.state_dict().values())]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general.architecture": "rwkv7"}, "GGUF files of architecture 'rwkv7' are not read; those of ll"),
    "part": ({"split.count": 3}, "it is one of 3 parts: make one file of them with `llama-gguf-split --merge`"),
    "adapter": ({"general.type": "adapter"}, "it is no model, but of type 'adapter'"),
    "more layers": ({"llama.block_count": 10**6}, "llama.block_count is 1000000, and there are 21 tensors"),
    "one layer more": ({"llama.block_count": 3}, r"the weights lack model.layers.2.\S+, and 8 more"),
    "one layer less": ({"llama.block_count": 1}, r"the model has no place for model.layers.1.\S+, and 8 more"),
    "no layers": ({"llama.block_count": 0}, "llama.block_count should be one whole number from 1 on"),
    "text": ({"llama.block_count": "2"}, "llama.block_count should be one whole number from 1 on"),
    "width": (
        {"llama.embedding_length": 1 << 30},
        "llama.embedding_length asks for 1073741824 rows, and no tensor has",
    ),
    "another width": ({"llama.embedding_length": 80}, "the weights have .* in another shape"),
    "inner width": ({"llama.feed_forward_length": 1 << 20}, "llama.feed_forward_length asks for 1048576 rows, and no"),
    "heads": ({"llama.attention.head_count": 1 << 16}, "llama.attention.head_count asks for 1048576 rows"),
    "odd heads": ({"llama.attention.head_count_kv": 3}, "blk.0.attn_k.weight has 32 rows, which 3 heads cannot share"),
    "values": ({"llama.attention.value_length": 8}, "llama.attention.value_length is 8, where a head has 16"),
    "part of a head": ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count is 8, where a head has 16"),
    "scaling": ({"llama.rope.scaling.type": "su"}, "llama.rope.scaling.type is 'su'; linear and yarn can be computed"),
    "no number": ({"llama.rope.freq_base": math.nan}, "llama.rope.freq_base should be a number"),
    "factors": ({}, "rope_freqs.weight has 3 factors, where a head has 16: twice as many"),
    "factors of nothing": ({}, "rope_freqs.weight should have positive numbers only"),
    "key": (
        {"llama.attention.sliding_window": 7},
        "a key 'llama.attention.sliding_window', which is not known in a ll",
    ),
    "tensor": ({}, "it has a tensor 'blk.0.ssm_a.weight', which is not known in a llama"),
}
ROWS = {
    "factors": {"rope_freqs.weight": [1.0] * 3},
    "factors of nothing": {"rope_freqs.weight": [0.0] * 8},
    "tensor": {"blk.0.ssm_a.weight": [1.0]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    metadata, said = REFUSED[name]
    gguf_files.write(tmp_path / "m.gguf", "llama", "F16", metadata=metadata, rows=ROWS.get(name))
    with pytest.raises(ModelRefused, match=said) as caught:
        registered(tmp_path / "m.gguf")
    assert caught.value.message.startswith(f"{tmp_path / 'm.gguf'}: ") and "\n" not in caught.value.message
    assert [entry for entry in tmp_path.glob("cache/images/*") if entry.suffix != ".lock"] == []


def test_more_layers_than_tensors_take_no_memory_in_any_architecture(tmp_path: Path) -> None:
    """A list of what each of them is would be made of gemma3's."""
    for model_type in ("gemma3_text", "gemma2", "phi3", "qwen3"):
        named = {"gemma3_text": "gemma3"}.get(model_type, model_type)
        file = tmp_path / f"{model_type}.gguf"
        gguf_files.write(file, model_type, "F16", metadata={f"{named}.block_count": 20_000_000})
        tracemalloc.start()
        try:
            with pytest.raises(ModelRefused, match=f"{named}.block_count is 20000000, and there are .. tensors"):
                registered(file)
            assert tracemalloc.get_traced_memory()[1] < 64 << 20
        finally:
            tracemalloc.stop()


def test_more_heads_than_values_are_refused(tmp_path: Path) -> None:
    sizes = {"head_count": 100, "head_count_kv": 100, "key_length": 1, "value_length": 1}
    metadata = {f"phi3.attention.{key}": size for key, size in sizes.items()} | {"phi3.rope.dimension_count": 2}
    gguf_files.write(tmp_path / "m.gguf", "phi3", "F16", metadata=metadata)
    with pytest.raises(ModelRefused) as caught:
        registered(tmp_path / "m.gguf")
    assert "division" not in caught.value.message


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "m.gguf", "llama", "F16")
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(whole[:-4096])
    with pytest.raises(ModelRefused, match="it is cut off, or its header is wrong; fetch it again"):
        registered(tmp_path / "m.gguf")


def test_the_vllm_engine_refuses_it(tmp_path: Path) -> None:
    gguf_files.write(tmp_path / "m.gguf", "llama", "F16")
    with pytest.raises(ModelRefused, match="the vLLM engine does not run GGUF files; the transformers engine does"):
        registered(tmp_path / "m.gguf", engine="vllm")


def test_a_directory_that_is_named_like_one_is_none(tmp_path: Path) -> None:
    checkpoints.write(tmp_path / "m.gguf", "llama")
    assert registered(tmp_path / "m.gguf")[0].note == ""
