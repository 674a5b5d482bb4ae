"""Shapes of real models, without their files: what the simulator needs to know of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from aegis.core.ids import ModelId
from aegis.core.model import KvLayer, KvShape, Manifest, ModelSpec, Quantised, Slo, WeightsName, linear_bytes

_ITEM_BYTES = 2  # bfloat16, as in all the papers


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense decoder with gated feed-forward layers and RMS norms, figures as in its `config.json`."""

    name: str
    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    context_tokens: int
    qkv_bias: bool = False
    tied: bool = False  # the output layer is the embedding

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the linear weights of a layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = ((queries, self.hidden), (keys, self.hidden), (keys, self.hidden), (self.hidden, queries))
        return (*attention, *((self.intermediate, self.hidden),) * 2, (self.hidden, self.intermediate))

    @property
    def parameters(self) -> int:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (2 * queries + 2 * keys) + (queries + 2 * keys if self.qkv_bias else 0)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def weight_bytes(self) -> int:
        return self.parameters * _ITEM_BYTES

    def image_bytes(self, weights: WeightsName = "dense") -> int:
        """Of the image that registering makes: linear weights packed, the last layer's if it has its own."""
        packed = self.linears * self.layers + (() if self.tied else ((self.vocab, self.hidden),))
        return self.weight_bytes - sum(
            rows * columns * _ITEM_BYTES - linear_bytes(weights, rows, columns, _ITEM_BYTES) for rows, columns in packed
        )

    def adapter_bytes(self, rank: int) -> int:
        """Of a LoRA adapter of all linear weights but the last layer's: two matrices of that rank for each."""
        return self.layers * sum(rank * (rows + columns) * _ITEM_BYTES for rows, columns in self.linears)

    @property
    def kv(self) -> KvShape:
        return _kv_shape(self.layers, self.kv_heads, self.head_dim)

    def spec(self, model: ModelId, slo: Slo, *, weights: WeightsName = "dense", beside_bytes: int = 0) -> ModelSpec:
        """As if registered from a checkpoint of its own, so that no two models share an image; its `root` is the
        shape's name. `beside_bytes` lie beside its image: those of adapters."""
        image_bytes = self.image_bytes(weights) + beside_bytes
        manifest = self._manifest(model, image_bytes, weights)
        return ModelSpec(model=model, manifest=manifest, directory="", image_path="", root=self.name, slo=slo)

    def _manifest(self, model: ModelId, image_bytes: int, weights: WeightsName) -> Manifest:
        packed = len(self.linears) * self.layers + (not self.tied)
        return Manifest(
            fingerprint=f"{self.name}/{model}",
            architecture=self.architecture,
            dtype="bfloat16",
            image_bytes=image_bytes,
            tensors=(),
            kv=self.kv,
            context_tokens=self.context_tokens,
            vocab_size=self.vocab,
            eos_token_ids=(),
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            parameters=self.parameters,
            quantised=None if weights == "dense" else Quantised(weights, packed, 1.0, 0.0),
        )


@cache  # finding one's slabs is quick where models of one shape share it
def _kv_shape(layers: int, heads: int, head_dim: int) -> KvShape:
    layer = KvLayer(heads=heads, key_dim=head_dim, value_dim=head_dim)
    return KvShape(layers=(layer,) * layers, dtype="bfloat16", itemsize=_ITEM_BYTES)


def _shape(
    name: str,
    layers: int,
    heads: tuple[int, int],
    hidden: int,
    intermediate: int,
    vocab: int,
    context_tokens: int,
    *,
    head_dim: int = 128,
    tied: bool = False,
) -> ModelShape:
    qwen = name.startswith("qwen")
    return ModelShape(
        name=name,
        architecture="Qwen2ForCausalLM" if qwen else "LlamaForCausalLM",
        layers=layers,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        hidden=hidden,
        intermediate=intermediate,
        vocab=vocab,
        context_tokens=context_tokens,
        qkv_bias=qwen,
        tied=tied,
    )


SHAPES = {
    shape.name: shape
    for shape in (
        _shape("yi-1.5-6b", 32, (32, 4), 4096, 11008, 64000, 4096),
        _shape("qwen2.5-7b", 28, (28, 4), 3584, 18944, 152064, 32768),
        _shape("yi-1.5-9b", 48, (32, 4), 4096, 11008, 64000, 4096),
        _shape("llama-2-13b", 40, (40, 40), 5120, 13824, 32000, 4096),
        _shape("qwen2.5-14b", 48, (40, 8), 5120, 13824, 152064, 32768),
        _shape("qwen2.5-32b", 64, (40, 8), 5120, 27648, 152064, 32768),
        _shape("qwen2.5-72b", 80, (64, 8), 8192, 29568, 152064, 32768),
        _shape("llama-3-8b", 32, (32, 8), 4096, 14336, 128256, 131072),
        _shape("llama-3-70b", 80, (64, 8), 8192, 28672, 128256, 131072),
        _shape("llama-3.2-1b", 16, (32, 8), 2048, 8192, 128256, 131072, head_dim=64, tied=True),
        _shape("llama-3.2-3b", 28, (24, 8), 3072, 8192, 128256, 131072, tied=True),
    )
}
"""The models of Aegaeon's figures (7B, 9B and 13B; 6B and 7B on A10; 72B), sizes between for one's own, and the two of
MuxWise's (8B, 70B; Llama 3.1, for contexts of 128 K), and small ones like most of Prism's (1B and 3B; Llama 3.2)."""

MIX = ("qwen2.5-7b",) * 6 + ("yi-1.5-9b",) * 2 + ("llama-2-13b",) * 2
"""Ten of Aegaeon's models, in the order of its artifact; model i of a market has the shape `MIX[i % 10]`."""
