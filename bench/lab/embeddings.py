"""Texts a second through `/v1/embeddings`, beside sentence-transformers: `aegis lab embeddings`.

The checkpoint has the shape of all-MiniLM-L6 and random weights; texts have some 40 words, some few and some many. Both
compute with one thread, and take turns; of each the median of the rounds counts. Both tokenize, and what is served
comes over HTTP.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import torch
from msgspec import Struct
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
from transformers.utils import logging

from aegis.core.errors import UserError, install_advice
from aegis.core.rng import Stream
from bench.common import result_files
from bench.common.figures import Figure, at_least, at_most
from bench.common.machine import Machine, describe
from bench.common.served import served

TEXTS, ROUNDS = 256, 5
RATIO_MIN, DIFFERENCE_MAX = 1.0, 1e-4
_NAME = "minilm"
_ASKED_AT_ONCE = 64
_BATCH = 32  # sentence-transformers' own
_CONTEXT_TOKENS = 256
_SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]")
_VOCABULARY = 30_000
_WORDS_MEDIAN, _WORDS_SPREAD, _WORDS_MAX = 28, 0.8, 250
_WAIT_S = 600.0


class Result(Struct, frozen=True):
    machine: Machine
    figures: tuple[Figure, ...]
    served_texts_per_s: tuple[float, ...]
    library_texts_per_s: tuple[float, ...]


def run(json_path: Path | None = None, *, texts: int = TEXTS, rounds: int = ROUNDS, layers: int = 6) -> Result:
    """Measures, prints the figures and writes all to `json_path`. Raises UserError."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise UserError(f"sentence-transformers is not installed; {install_advice('bench')}") from error
    if json_path:
        result_files.check(json_path)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    drawn = _texts(texts)
    with tempfile.TemporaryDirectory(prefix="aegis-") as scratch:
        checkpoint = write_checkpoint(Path(scratch) / _NAME, layers=layers)
        library = SentenceTransformer(str(checkpoint), device="cpu")
        options = ["--models", scratch, "--dtype", "float32", "--mixed", "1", "--device-memory", "512MiB"]
        with served(options) as url, httpx.Client(base_url=url, timeout=_WAIT_S, trust_env=False) as client:
            _served(client, drawn[:_ASKED_AT_ONCE])  # its weights are there
            library.encode(drawn[:_BATCH])
            ours, theirs, difference = list[float](), list[float](), 0.0
            for _ in range(rounds):
                began_s = time.monotonic()
                expected = library.encode(drawn, batch_size=_BATCH)
                between_s = time.monotonic()
                vectors = _served(client, drawn)
                theirs.append(texts / (between_s - began_s))
                ours.append(texts / (time.monotonic() - between_s))
                difference = max(difference, float(np.abs(vectors - expected).max()))
    figures = (
        Figure("texts a second, served", median(ours), "1/s"),
        Figure("texts a second, sentence-transformers", median(theirs), "1/s"),
        at_least("served ÷ sentence-transformers", median(ours) / median(theirs), "", RATIO_MIN),
        at_most("largest difference of a value", difference, "", DIFFERENCE_MAX),
    )
    result = Result(describe(), figures, tuple(ours), tuple(theirs))
    console = Console(markup=False, highlight=False)
    for figure in figures:
        console.print(f"{figure.name:50} {figure.value:10.4g} {figure.unit} {figure.wanted}".rstrip())
    if json_path:
        result_files.write_json(json_path, result)
    return result


def write_checkpoint(directory: Path, *, layers: int) -> Path:
    """Writes a checkpoint with the files of sentence-transformers: the mean of all tokens, normalised."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=_VOCABULARY,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=12,
        max_position_embeddings=_CONTEXT_TOKENS,
    )
    BertModel(config).save_pretrained(directory)
    words = [*_SPECIAL, *[f"w{number}" for number in range(_VOCABULARY - len(_SPECIAL))]]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        model_max_length=_CONTEXT_TOKENS,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    ).save_pretrained(directory)
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (kind, path) in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "2_Normalize").mkdir()
    pooling = {"word_embedding_dimension": config.hidden_size, "pooling_mode_mean_tokens": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


def _texts(count: int) -> list[str]:
    draws = Stream(0, "bench embeddings")

    def text() -> str:
        spread = sum(draws.uniform() for _ in range(12)) - 6  # about normal
        words = min(max(round(_WORDS_MEDIAN * math.exp(_WORDS_SPREAD * spread)), 1), _WORDS_MAX)
        return " ".join(f"w{draws.below(_VOCABULARY - len(_SPECIAL))}" for _ in range(words))

    return [text() for _ in range(count)]


def _served(client: httpx.Client, texts: Sequence[str]) -> Any:
    vectors = []
    for first in range(0, len(texts), _ASKED_AT_ONCE):
        body = {"model": _NAME, "input": texts[first : first + _ASKED_AT_ONCE], "encoding_format": "base64"}
        reply = client.post("/v1/embeddings", json=body).raise_for_status().json()
        vectors += [np.frombuffer(b64decode(each["embedding"]), "<f4") for each in reply["data"]]
    return np.stack(vectors)
