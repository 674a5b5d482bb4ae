"""Models that can be served are recognised, others are refused with a reason, by watching and not by name."""

import pytest
import torch
from transformers import AutoConfig

from aegis.core.errors import ModelRefused
from aegis.core.model import KvLayer
from aegis.models.kv_probe import context_tokens, probe, refuse_by_config
from tests import checkpoints

SERVABLE: dict[str, KvLayer] = {
    "llama": KvLayer(2, 16, 16),
    "gpt2": KvLayer(4, 16, 16),
    "gemma2": KvLayer(2, 16, 16),
    "gemma3_text": KvLayer(2, 16, 16),
    "mistral": KvLayer(2, 16, 16),
    "gpt_oss": KvLayer(2, 16, 16),
    "mixtral": KvLayer(2, 16, 16),
    "gpt_bigcode": KvLayer(1, 16, 16),
    "deepseek_v2": KvLayer(4, 24, 16),
}

REFUSED_BY_CONFIG = {
    "t5": "is an encoder-decoder",
    "mamba": "keeps a recurrent state",
    "jamba": "keeps a recurrent state",
    "falcon_h1": "keeps a recurrent state",
    "vit": "ViTConfig is not a causal language model",
    "gemma3": "is multimodal",
    "llama4_text": "has chunked_attention layers",
    "lfm3": "has conv layers",
}

REFUSED_BY_WATCHING = {
    "bert": "attends to later tokens: it is an encoder",
    "bloom": "has an attention of its own",
    "xglm": "has an attention of its own",
    "diffllama": "does not attend once per layer: 4 calls in 2 layers",
    "doge": "masks its attention in a way of its own",
    "inkling_text": "passes position_bias to its attention",
}


@pytest.mark.parametrize("model_type", SERVABLE)
def test_the_kv_shape_is_what_attention_is_given(model_type: str) -> None:
    model = checkpoints.model(model_type, dtype=torch.bfloat16)
    refuse_by_config(model.config)
    found = probe(model)
    assert set(found.layers) == {SERVABLE[model_type]}
    assert (found.kv_dtype, found.vocab_size) == (torch.bfloat16, checkpoints.VOCAB_SIZE)


@pytest.mark.parametrize("model_type", REFUSED_BY_CONFIG)
def test_the_configuration_alone_rules_out(model_type: str) -> None:
    with pytest.raises(ModelRefused, match=REFUSED_BY_CONFIG[model_type]):
        refuse_by_config(AutoConfig.for_model(model_type))


@pytest.mark.parametrize("model_type", REFUSED_BY_WATCHING)
def test_watching_one_pass_rules_out(model_type: str) -> None:
    with pytest.raises(ModelRefused, match=REFUSED_BY_WATCHING[model_type]):
        probe(checkpoints.model(model_type))


def test_the_attention_of_the_model_is_as_before() -> None:
    model = checkpoints.model("llama")
    model.set_attn_implementation("eager")
    probe(model)
    assert model.config._attn_implementation == "eager"


def test_heads_for_other_tasks_are_refused() -> None:
    config = checkpoints.config("llama", architectures=["LlamaForSequenceClassification"])
    with pytest.raises(ModelRefused, match="LlamaForSequenceClassification is not a causal language model"):
        refuse_by_config(config)


@pytest.mark.parametrize(
    ("rope", "tokens"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 256),
        ({"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}, 64),
        (
            {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
            | {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
            64,
        ),
    ],
    ids=lambda rope: rope["rope_type"] if isinstance(rope, dict) else "",
)
def test_the_context_ends_where_the_batch_would_change_the_frequencies(rope: dict[str, object], tokens: int) -> None:
    assert context_tokens(checkpoints.config("llama", rope_parameters=rope)) == tokens


def test_learned_positions_bound_the_context() -> None:
    assert context_tokens(checkpoints.config("gpt2")) == 256


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_that_nothing_is_in_is_refused(window: int) -> None:
    with pytest.raises(ModelRefused, match=f"config.json: sliding_window is {window}; it has to be 1 at least"):
        probe(checkpoints.model("mistral", sliding_window=window))
