"""Models of Llama's kind as the compiled code takes them: addresses of their weights, and arrays of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from aegis.core.model import ModelSpec, TensorEntry
from aegis.engine.cpu.library import (
    BLOCK,
    COLUMNS_MAX,
    INT4,
    INT8,
    NARROW,
    PACKED,
    ROWS,
    Layer,
    Linear,
    Model,
    Step,
    knows,
    library,
)
from aegis.engine.cpu.low_rank import Changes
from aegis.engine.protocol import StepRow
from aegis.engine.quantised.layers import Int4Blocks, Int8Digits
from aegis.engine.scratch import Scratch
from aegis.engine.tensor_views import CPU, KvViews, dtype_named

_KINDS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROTARY = ("default", "linear", "llama3", "yarn")  # whose frequencies never change
_PLACES = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_OF_ONE_INPUT = (("query", "key", "value"), ("gate", "up"))
_VECTOR = 16

Address = int


class _Unsupported(Exception):
    """The compiled code cannot run it."""


class LlamaSteps:
    """The decode steps of one model. Its weights and KV stay where they are for life."""

    __slots__ = ("_dtype", "_held", "_library", "_model", "_views", "_vocabulary", "adapters")

    def __init__(self, model: Model, held: Any, found: ctypes.CDLL, views: KvViews) -> None:
        self._model, self._held, self._library, self._views = model, held, found, views
        self._dtype, self._vocabulary = views.dtype, model.vocabulary
        self.adapters = Changes([_path(layer, place) for layer in range(model.layers) for place in _PLACES.values()])

    def decode(self, rows: Sequence[StepRow], scratch: Scratch) -> torch.Tensor:
        """Logits `[rows, vocabulary]` of rows of one token each."""
        views = self._views
        units = [views.units(row.blocks[: row.start // views.block_tokens + 1]) for row in rows]
        first = np.array([0, *accumulate(map(len, units))], dtype=np.int64)
        tokens = np.array([row.tokens[0] for row in rows], dtype=np.int64)
        positions = np.array([row.start for row in rows], dtype=np.int64)
        together = np.ascontiguousarray(np.concatenate(units), dtype=np.int64)
        logits = torch.empty(len(rows), self._vocabulary, dtype=self._dtype)
        nbytes = self._library.aegis_scratch_bytes(self._model, len(rows), int(positions.max()) + 1)
        memory = scratch.take("step", (nbytes,), torch.uint8, CPU)
        addresses = [array.ctypes.data for array in (tokens, positions, first, together)]
        adapters = self.adapters.of_rows([row.adapter for row in rows])
        changes = adapters.pointer if adapters else None
        step = Step(len(rows), torch.get_num_threads(), *addresses, logits.data_ptr(), memory.data_ptr(), changes)
        self._library.aegis_decode(self._model, step)
        return logits


def _path(layer: int, place: str) -> str:
    return f"model.layers.{layer}.{place}"


def llama_steps(module: PreTrainedModel, spec: ModelSpec, base: int, views: KvViews) -> LlamaSteps | None:
    """None: the model's steps have to run through its modules."""
    found = library()
    if found is None or type(module).__name__ not in _KINDS or spec.manifest.ranks != 1:
        return None
    try:
        plan = _Plan(module, spec, base, views)
        layers = (Layer * len(views.layers))(*map(plan.layer, range(len(views.layers))))
        return LlamaSteps(plan.model(layers), (layers, module), found, views)
    except _Unsupported:
        return None


def _demand(condition: object) -> None:
    if not condition:
        raise _Unsupported


def _read(linear: Linear) -> tuple[int, int]:
    """The form in which it reads its input."""
    return (linear.form if linear.form in (INT8, INT4) else PACKED), linear.group


class _Plan:
    def __init__(self, module: PreTrainedModel, spec: ModelSpec, base: int, views: KvViews) -> None:
        self._config: Any = module.config
        self._body: Any = module.model
        self._base, self._views = base, views
        self._entries: Mapping[str, TensorEntry] = {
            name: entry for entry in spec.manifest.tensors for name in entry.names
        }
        self._dtype = dtype_named(spec.manifest.dtype)
        rotary, config = self._body.rotary_emb, self._config
        first = views.layers[0]
        _demand(self._dtype == views.dtype and self._dtype in (torch.float32, torch.bfloat16))
        _demand(config.hidden_act == "silu" and rotary.rope_type in _ROTARY)
        _demand(all(layer.geometry == 0 for layer in views.layers) and first.key_dim == first.value_dim)
        _demand(all(getattr(each.self_attn, "sliding_window", None) is None for each in self._body.layers))
        self._windowless()
        self._heads, self._head = config.num_attention_heads, first.key_dim
        _demand(len(self._body.layers) == len(views.layers) and self._heads % first.heads == 0)
        _demand(all(size % _VECTOR == 0 for size in (self._head, config.hidden_size, config.intermediate_size)))

    def _windowless(self) -> None:
        """Layers may also ask the configuration, as Mistral's do."""
        if type(self._body).__name__ == "MistralModel":
            _demand(self._config.sliding_window is None)

    def layer(self, at: int) -> Layer:
        prefix, cache = f"model.layers.{at}.", self._views.layers[at]
        linears = {name: self._linear(_path(at, place)) for name, place in _PLACES.items()}
        for alike in _OF_ONE_INPUT:
            _demand(len({_read(linears[name]) for name in alike}) == 1)
        attention = self._body.layers[at].self_attn
        _demand(attention.scaling == self._body.layers[0].self_attn.scaling)
        by_head = hasattr(attention, "q_norm")
        blocks = self._views.blocks.storage_offset()
        return Layer(
            *linears.values(),
            self._norm(prefix + "input_layernorm"),
            self._norm(prefix + "post_attention_layernorm"),
            self._norm(prefix + "self_attn.q_norm") if by_head else None,
            self._norm(prefix + "self_attn.k_norm") if by_head else None,
            cache.keys.storage_offset() - blocks,
            cache.values.storage_offset() - blocks,
        )

    def model(self, layers: Any) -> Model:
        config, rotary, blocks = self._config, self._body.rotary_emb, self._views.blocks
        last = self._linear("lm_head")
        frequencies = self._entries.get("model.rotary_emb.inv_freq")
        if frequencies is None or frequencies.dtype != "float32" or frequencies.shape != (self._head // 2,):
            raise _Unsupported
        return Model(
            len(layers),
            config.hidden_size,
            config.intermediate_size,
            self._heads,
            self._views.layers[0].heads,
            self._head,
            last.rows,
            self._dtype == torch.bfloat16,
            config.rms_norm_eps,
            self._body.layers[0].self_attn.scaling,
            rotary.attention_scaling,
            self._plain("model.embed_tokens.weight"),
            self._norm("model.norm"),
            self._base + frequencies.offset,
            last,
            layers,
            blocks.data_ptr(),
            blocks.stride(0),
            blocks.shape[1],
            self._views.block_tokens,
        )

    def _plain(self, name: str) -> Address:
        """The address of a tensor that is stored as the module has it."""
        entry = self._entries.get(name)
        if entry is None or entry.packing or dtype_named(entry.dtype) != self._dtype:
            raise _Unsupported
        return self._base + entry.offset

    def _norm(self, path: str) -> Address:
        return self._plain(f"{path}.weight")

    def _linear(self, path: str) -> Linear:
        bias = self._plain(f"{path}.bias") if f"{path}.bias" in self._entries else None
        entries = {leaf: self._entries.get(f"{path}.{leaf}") for leaf in ("weight", *_FORMS)}
        leaf, entry = next(((leaf, entry) for leaf, entry in entries.items() if entry), ("", None))
        if entry is None:
            raise _Unsupported
        if leaf == "weight":
            _demand(dtype_named(entry.dtype) == self._dtype)
            packed = PACKED if knows(PACKED, self._dtype) else NARROW
            form, scales = (packed if entry.packing else ROWS), None
        else:
            form, scales = _FORMS[leaf], self._entries[f"{path}.scales"]
        rows, columns = entry.shape if form != INT4 else (entry.shape[0], entry.shape[1] * 2)
        _demand(knows(form, self._dtype) and columns % BLOCK == 0 and columns <= COLUMNS_MAX)
        _demand(form == ROWS or rows % BLOCK == 0)
        group = columns // scales.shape[0] if form == INT4 and scales else 0
        at = self._base + scales.offset if scales else None
        return Linear(self._base + entry.offset, bias, at, rows, columns, form, group)


_FORMS = {Int8Digits.INTEGERS: INT8, Int4Blocks.INTEGERS: INT4}
