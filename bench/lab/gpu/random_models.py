"""Models with random weights, made on the GPU from a configuration alone: no checkpoint, no file of weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from aegis.core.ids import ModelId
from aegis.core.model import TENSOR_ALIGNMENT_BYTES, KvLayer, KvShape, Manifest, ModelSpec, TensorEntry
from aegis.engine.tensor_views import tensor_at

CUDA = torch.device("cuda")
_STD = 0.02

LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
)


def small(layers: int) -> LlamaConfig:
    """A model of a few hundred MiB."""
    return LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
    )


@dataclass(frozen=True)
class RandomModel:
    """`buffers` hold what is computed rather than drawn, by name; `config` must be a Llama's."""

    spec: ModelSpec
    buffers: dict[str, torch.Tensor]

    def fill(self, base: int, seed: int, device: torch.device = CUDA) -> None:
        """Writes the weights at `base`. Runs on torch's current stream."""
        generator = torch.Generator(device).manual_seed(seed)
        for entry in self.spec.manifest.tensors:
            tensor = tensor_at(base + entry.offset, entry.shape, getattr(torch, entry.dtype), device)
            if entry.buffer:
                tensor.copy_(self.buffers[entry.names[0]])
            elif len(entry.shape) == 1:
                tensor.fill_(1)
            else:
                tensor.normal_(0, _STD, generator=generator)


def make(name: str, config: LlamaConfig, directory: Path, dtype: torch.dtype = torch.bfloat16) -> RandomModel:
    """Writes `config.json` below `directory`, nothing else."""
    into = directory / name
    into.mkdir()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(into)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    buffers = _buffers(config)
    entries, nbytes = _laid_out(model, buffers)
    layer = KvLayer(config.num_key_value_heads, *[config.hidden_size // config.num_attention_heads] * 2)
    kv = KvShape((layer,) * config.num_hidden_layers, _name(dtype), dtype.itemsize)
    manifest = Manifest(
        fingerprint=name,
        architecture="LlamaForCausalLM",
        dtype=_name(dtype),
        image_bytes=nbytes,
        tensors=tuple(entries),
        kv=kv,
        context_tokens=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        eos_token_ids=(),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
    return RandomModel(ModelSpec(ModelId(name), manifest, str(into), "", str(into)), buffers)


def _buffers(config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Rotary frequencies: the same for any number of layers, so a model of one layer and hardly any words has them."""
    tiny = type(config).from_dict(config.to_dict() | {"num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8})
    model = AutoModelForCausalLM.from_config(tiny)
    return dict(model.named_buffers())


def _laid_out(model: torch.nn.Module, buffers: dict[str, torch.Tensor]) -> tuple[list[TensorEntry], int]:
    entries, offset = list[TensorEntry](), 0
    named = [(name, tensor, False) for name, tensor in model.named_parameters()]
    for name, tensor, buffer in (*named, *((name, tensor, True) for name, tensor in buffers.items())):
        entries.append(TensorEntry((name,), _name(tensor.dtype), tuple(tensor.shape), offset, tensor.nbytes, buffer))
        offset += -(-tensor.nbytes // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
    return entries, offset


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
