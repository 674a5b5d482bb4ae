"""Tiny models that pool, made on the spot: random weights, real architectures, the files of sentence-transformers."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from aegis.engine.lean_transformers import import_transformers

import_transformers()

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

_TEXT = "the cat and a hat sat on mat then they ran again over green hills while rain fell into seas of blue"
WORDS = _TEXT.split()
_SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
PAD, BEGIN, END, UNKNOWN = range(4)
VOCAB_SIZE = len(_SPECIAL) + len(WORDS)
POSITIONS = 64
_SPREAD = 1.7

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": PAD,
    "bos_token_id": BEGIN,
    "eos_token_id": END,
}
_OWN: dict[str, dict[str, Any]] = {
    "mpnet": {"max_position_embeddings": POSITIONS + 2},
    "roberta": {"max_position_embeddings": POSITIONS + 1, "type_vocab_size": 1},
    "xlm-roberta": {"max_position_embeddings": POSITIONS + 1, "type_vocab_size": 1},
    "modernbert": {"cls_token_id": BEGIN, "sep_token_id": END, "local_attention": 8, "global_attn_every_n_layers": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
}
LOOKS_BACK = ("qwen3",)


def write(
    directory: Path,
    model_type: str,
    *,
    pooling: dict[str, Any] | None = None,
    normalises: bool = True,
    prompt: str = "",
    dense: tuple[int, ...] = (),
    seed: int = 0,
    **changes: Any,
) -> Path:
    """A model of embeddings, with layers to so many dimensions behind its pooling. Without `pooling` there are no files
    of sentence-transformers."""
    config = AutoConfig.for_model(model_type, **(_COMMON | _OWN.get(model_type, {}) | changes))
    _save(AutoModel.from_config(config), directory, seed)
    _write_tokenizer(directory, pair_types=model_type == "bert", ends_only=model_type in LOOKS_BACK)
    if pooling is not None:
        write_modules(directory, pooling, normalises=normalises, prompt=prompt, dense=dense)
    return directory


def write_reranker(directory: Path, model_type: str, *, seed: int = 0, labels: int = 1, **changes: Any) -> Path:
    """A cross-encoder."""
    own = _COMMON | _OWN.get(model_type, {}) | {"num_labels": labels} | changes
    _save(AutoModelForSequenceClassification.from_config(AutoConfig.for_model(model_type, **own)), directory, seed)
    _write_tokenizer(directory, pair_types=model_type == "bert", ends_only=model_type in LOOKS_BACK)
    return directory


def _save(model: Any, directory: Path, seed: int) -> None:
    """Weights larger than at the start of training, so that outputs differ clearly between texts."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=draws) * _SPREAD / parameter.shape[-1] ** 0.5)
    model.save_pretrained(directory)


def _write_tokenizer(directory: Path, *, pair_types: bool, ends_only: bool) -> None:
    """Words. `pair_types`: the second text of a pair has a type of its own. `ends_only`: nothing begins a text."""
    vocabulary = {word: at for at, word in enumerate([*_SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    second = "1" if pair_types else "0"
    single, pair = "<s> $A </s>", f"<s> $A </s> $B:{second} </s>:{second}"
    if ends_only:
        single, pair = "$A </s>", "$A $B </s>"
    specials = [("<s>", BEGIN), ("</s>", END)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=specials)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        unk_token="<unk>",
        model_max_length=POSITIONS,
        model_input_names=["input_ids", "attention_mask", *(["token_type_ids"] if pair_types else [])],
    )
    fast.save_pretrained(directory)


def write_modules(
    directory: Path, pooling: dict[str, Any], *, normalises: bool, prompt: str, dense: tuple[int, ...] = ()
) -> None:
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    kinds += [(f"{number}_Dense", "Dense") for number in range(2, 2 + len(dense))]
    kinds += [("9_Normalize", "Normalize")] if normalises else []
    sizes = (32, *dense)
    for number, (size, out) in enumerate(pairwise(sizes), 2):
        _write_dense(directory / f"{number}_Dense", size, out, tanh=number % 2 == 0)
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 48, "do_lower_case": False}))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32} | pooling))
    if normalises:
        (directory / "9_Normalize").mkdir()
    own = {"prompts": {"query": prompt}, "default_prompt_name": "query"} if prompt else {"prompts": {}}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(own))


def _write_dense(directory: Path, size: int, out: int, *, tanh: bool) -> None:
    draws = torch.Generator().manual_seed(out)
    weights = {"linear.weight": torch.randn(out, size, generator=draws) / size**0.5}
    if tanh:
        weights["linear.bias"] = torch.randn(out, generator=draws)
    directory.mkdir()
    save_file(weights, directory / "model.safetensors")
    activation = "torch.nn.modules.activation.Tanh" if tanh else "torch.nn.modules.linear.Identity"
    config = {"in_features": size, "out_features": out, "bias": tanh, "activation_function": activation}
    (directory / "config.json").write_text(json.dumps(config))
