"""llama.cpp's side of a contest in decoding: the checkpoint as a GGUF file, and its library in this process."""

from __future__ import annotations

import ctypes
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from aegis.core.errors import UserError

FileType = Literal["BF16", "Q8_0", "Q4_0"]

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def imported() -> tuple[Any, Any]:
    """llama_cpp and gguf. Raises UserError."""
    try:
        llama_cpp, gguf = import_module("llama_cpp"), import_module("gguf")
    except ImportError as error:
        raise UserError(
            f"{error.name} is not installed: pip install llama-cpp-python gguf (it takes minutes)"
        ) from error
    return llama_cpp, gguf


def write_gguf(model: PreTrainedModel, path: Path, kind: FileType) -> None:
    """A model of Llama's kind, without a tokenizer. Norms are float32, as llama.cpp's own converter has them."""
    _, gguf = imported()
    config: Any = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("no_vocab")
    for name, tensor in model.state_dict().items():
        values = tensor.float()
        if "q_proj" in name or "k_proj" in name:
            values = _in_pairs(values, config.hidden_size // config.num_attention_heads)
        form = gguf.GGMLQuantizationType[kind if values.ndim == 2 else "F32"]
        writer.add_tensor(_renamed(name), gguf.quants.quantize(values.numpy(), form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _renamed(name: str) -> str:
    path = name.removesuffix(".weight")
    if path in _OUTER:
        return f"{_OUTER[path]}.weight"
    _, _, layer, rest = path.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest]}.weight"


def _in_pairs(weight: torch.Tensor, head: int) -> torch.Tensor:
    """llama.cpp rotates neighbours, transformers a value of the first half of a head with one of the second."""
    columns = weight.shape[1]
    return weight.view(-1, 2, head // 2, columns).transpose(1, 2).reshape(-1, columns)


class LlamaCppSide:
    """`rows` sequences of up to `tokens` tokens."""

    def __init__(self, path: Path, *, rows: int, tokens: int, threads: int) -> None:
        self._library, _ = imported()
        quiet = self._library.llama_log_callback(_ignore)
        self._library.llama_log_set(quiet, ctypes.c_void_p(0))
        self._quiet = quiet
        self._library.llama_backend_init()
        self._model = self._library.llama_model_load_from_file(
            str(path).encode(), self._library.llama_model_default_params()
        )
        params = self._library.llama_context_default_params()
        params.n_ctx = rows * -(-tokens // 256) * 256
        params.n_batch = params.n_ubatch = max(512, tokens)
        params.n_seq_max = rows
        params.n_threads = params.n_threads_batch = threads
        self._context = self._library.llama_init_from_model(self._model, params)
        if not self._model or not self._context:
            raise RuntimeError("llama.cpp does not load the file")
        self._vocabulary = self._library.llama_vocab_n_tokens(self._library.llama_model_get_vocab(self._model))
        self._batch = self._library.llama_batch_init(max(tokens, rows), 0, 1)

    def fill(self, prompt: list[int], batch: int) -> list[int]:
        """KV of the prompt in every row; their first tokens."""
        memory = self._library.llama_get_memory(self._context)
        self._library.llama_memory_clear(memory, True)
        first = []
        for row in range(batch):
            entries = [(token, at, row, at == len(prompt) - 1) for at, token in enumerate(prompt)]
            first += self._decode(entries)
        return first

    def run(self, first: list[int], context: int, tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds that all tokens but the first take, and all tokens of each row."""
        memory = self._library.llama_get_memory(self._context)
        for row in range(len(first)):
            self._library.llama_memory_seq_rm(memory, row, context, -1)
        out = [[token] for token in first]
        start = time.perf_counter()
        for step in range(tokens - 1):
            last = [(tokens_of[-1], context + step, row, True) for row, tokens_of in enumerate(out)]
            for tokens_of, token in zip(out, self._decode(last), strict=True):
                tokens_of.append(token)
        return time.perf_counter() - start, out

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Of (token, position, sequence, whether its logits are wanted), the likeliest tokens where they are."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for at, (token, position, row, wanted) in enumerate(entries):
            batch.token[at], batch.pos[at] = token, position
            batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, row, wanted
        if self._library.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama.cpp does not decode")
        wanted_rows = sum(wanted for *_, wanted in entries)
        logits = np.ctypeslib.as_array(
            self._library.llama_get_logits(self._context), shape=(wanted_rows, self._vocabulary)
        )
        tokens: list[int] = logits.argmax(1).tolist()
        return tokens

    def close(self) -> None:
        self._library.llama_batch_free(self._batch)
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)


def _ignore(level: int, text: bytes, data: object) -> None:
    """Takes lines of llama.cpp's log, and does nothing with them."""
