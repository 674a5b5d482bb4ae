"""The facts about a model that the whole system shares: its manifest, the shape of its KV cache, its deadlines."""

from __future__ import annotations

from functools import cache
from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from aegis.core.ids import ModelId
from aegis.core.limits import Limits

TENSOR_ALIGNMENT_BYTES = 256

IMAGE_PIECE_BYTES = 4 << 20
"""A weight image is read and checked in pieces of this size; the last one is shorter."""

EngineName = Literal["transformers", "vllm"]

WeightsName = Literal["dense", "int8", "int4", "int4-g64", "int4-g32"]
"""How linear weights are stored: as the checkpoint has them, or quantised; int4 in groups of 128, where that divides
their rows."""

GROUPS = (128, 64, 32)
"""Sizes of groups that the kernels for 4 bits know."""

_VECTOR = 16
_ASKED = {"int4": 128, "int4-g64": 64, "int4-g32": 32}

IMAGE_EXTENT_BYTES = 2 << 20
"""The node's model cache is cut in extents of this size; an image begins at the start of one."""

PIECE_BYTES = 8 << 20
"""Of a load over several devices' links (Prism §5.3) a peer is asked for one such piece after the other."""

PLACES = 3
"""Pieces that a peer has room for: one arrives while another one goes on, and the next was asked for."""

STAGING_BYTES = PLACES * PIECE_BYTES
"""24 MiB; Prism's buffer has 30 MB."""

PEERS_MAX = 7
"""Of one load: a node of eight devices has no more."""

LEAST_PIECES = 8
"""Smaller images arrive before a peer could help."""


def image_name(rank: int = 0) -> str:
    """The name of a rank's image in its directory."""
    return f"image-{rank}.bin" if rank else "image.bin"


def group_of(weights: WeightsName, columns: int) -> int | None:
    """The group in which rows of so many columns are quantised to 4 bits; None: to 8 bits, with a scale a row."""
    asked = _ASKED.get(weights, 0)
    return next((group for group in GROUPS if group <= asked and columns % group == 0), None)


def is_whole(rows: int, columns: int) -> bool:
    """Whether kernels take it: they read whole vectors, also beyond its end."""
    return rows % _VECTOR == 0 and columns % _VECTOR == 0


def linear_bytes(weights: WeightsName, rows: int, columns: int, item_bytes: int) -> int:
    """The bytes of a linear weight `[rows, columns]` whose items, and whose scales, have `item_bytes` each."""
    elements = rows * columns
    if weights == "dense" or not is_whole(rows, columns):
        return elements * item_bytes
    group = group_of(weights, columns)
    if group is None:
        return elements + rows * item_bytes
    return elements // 2 + elements // group * 2 * item_bytes


class TensorEntry(Struct, frozen=True):
    """One tensor of a weight image. Tied tensors are stored once: `names` lists every path it is bound to."""

    names: tuple[str, ...]
    dtype: str  # as torch prints it without the prefix: "float32", "bfloat16", "int64"
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    buffer: bool  # a module buffer (persistent or not) rather than a parameter
    packing: bytes = b""  # oneDNN's description of the bytes of a linear weight; none: they are the tensor's rows


class KvLayer(Struct, frozen=True):
    """Per token, one layer caches `heads * (key_dim + value_dim)` elements."""

    heads: int
    key_dim: int
    value_dim: int


PLACE_BYTES = 256
"""A block of a shape without layers holds nothing, and is counted all the same: what bounds a batch is blocks."""


class KvShape(Struct, frozen=True, cache_hash=True):
    """The KV cache of one model. Block-first: all layers, K then V, of one block are contiguous. Without layers, no KV
    is kept.

    Within a block, layer l holds K as [block_tokens, heads, key_dim] and then V as [block_tokens, heads, value_dim].
    """

    layers: tuple[KvLayer, ...]
    dtype: str
    itemsize: int
    block_tokens: int = 16

    @property
    def token_bytes(self) -> int:
        return _token_bytes(self)

    @property
    def block_bytes(self) -> int:
        return _token_bytes(self) * self.block_tokens or PLACE_BYTES

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)


@cache
def _token_bytes(shape: KvShape) -> int:
    return shape.itemsize * sum(layer.heads * (layer.key_dim + layer.value_dim) for layer in shape.layers)


SLO_NS_MIN, SLO_NS_MAX = 1_000, 86_400_000_000_000
"""The range of deadlines that users may set. Schedulers divide by deadlines, and due times have to fit the integers of
a message."""


class Slo(Struct, frozen=True):
    """Token i is due at `arrival + ttft + i * tbt` (Aegaeon §2.1). `gap_ns` is the longest pause of a stream that runs:
    other prompts are cut into pieces for it. None of them is 0."""

    ttft_ns: int = 10_000_000_000
    tbt_ns: int = 100_000_000
    gap_ns: int = 500_000_000

    def due_ns(self, arrival_ns: int, index: int) -> int:
        return arrival_ns + self.ttft_ns + index * self.tbt_ns

    def on_time(self, arrival_ns: int, tokens: range, came_ns: int) -> int:
        """The number of these tokens that are on time if all of them come at `came_ns`."""
        return sum(came_ns <= self.due_ns(arrival_ns, index) for index in tokens)


Pace = Literal["made", "smooth"]
"""Of a stream. `made`: tokens leave as they are made; `smooth`: no earlier than a reader wants them."""

PACES: tuple[str, ...] = get_args(Pace)


class ModelChange(Struct, frozen=True):
    """A change of a model that is served; None: the value stays."""

    ttft_ns: int | None = None
    tbt_ns: int | None = None
    gap_ns: int | None = None
    priority: int | None = None
    limits: Limits | None = None
    pinned: bool | None = None
    pace: Pace | None = None

    def deadlines(self, now: Slo) -> Slo:
        """The deadlines that the model has after the change."""
        return Slo(self.ttft_ns or now.ttft_ns, self.tbt_ns or now.tbt_ns, self.gap_ns or now.gap_ns)


PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
"""As sentence-transformers names them."""


class Dense(Struct, frozen=True):
    """A linear layer behind the pooling."""

    dimensions: int
    bias: bool
    tanh: bool  # behind it


class Pooling(Struct, frozen=True):
    """What is made of a text by a model that generates none. If it `scores`, that is the one label of its own head, and
    the rest is of no use; else the results of all `modes` on its last hidden states, one behind the other."""

    dimensions: int
    modes: tuple[PoolingMode, ...] = ()
    dense: tuple[Dense, ...] = ()
    normalises: bool = False
    scores: bool = False
    sigmoid: bool = False  # the score is squeezed between 0 and 1
    prompt: str = ""  # comes before each text, unless another one is named
    prompts: tuple[tuple[str, str], ...] = ()  # by name
    lowercases: bool = False  # texts, whatever the tokenizer does

    @property
    def task(self) -> Literal["embed", "rerank"]:
        return "rerank" if self.scores else "embed"


class Quantised(Struct, frozen=True):
    """How an image's weights are quantised, and what that costs: perplexity over that of the dense checkpoint, and the
    largest difference of a logit as a share of the spread of the logits."""

    weights: WeightsName
    layers: int
    perplexity_ratio: float
    logit_difference: float

    @property
    def told(self) -> str:
        return (
            f"{self.weights}, perplexity x {self.perplexity_ratio:.3f}, logits off by up to "
            f"{self.logit_difference:.1%} of their spread"
        )


class Adapter(Struct, frozen=True):
    """What makes an image that of a LoRA adapter: its tensors are pairs, `<layer>.A [rank, in]` and `<layer>.B [out,
    rank]`, and to what the layer makes of x comes `scale * B A x`."""

    base: str  # the fingerprint of the image beside which it was made
    rank: int
    scale: float


class Manifest(Struct, frozen=True):
    """The description of an image directory, in its `manifest.json`. Beside it lie `image.bin`, one more image for each
    further rank, `config.json` and, if the checkpoint has one, `tokenizer.json` with its configuration."""

    fingerprint: str
    architecture: str  # transformers' class name
    dtype: str
    image_bytes: int
    tensors: tuple[TensorEntry, ...]
    kv: KvShape
    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    parameters: int
    engine: EngineName = "transformers"  # whose layout of weights and KV it has
    checksums: bytes = b""  # CRC-32 of each piece of the image, little-endian; none: it is not checked
    ranks: int = 1  # that share the model out; each has an image of this layout and size, and KV of this shape
    pooling: Pooling | None = None  # of a model that generates nothing
    quantised: Quantised | None = None
    came: str = ""  # what its checkpoint's weights were and run as, where that is something else
    adapter: Adapter | None = None  # KV and vocabulary are the base's


class ModelSpec(Struct, frozen=True):
    """A registered model as it travels to instances."""

    model: ModelId
    manifest: Manifest
    directory: str  # the image directory
    image_path: str  # the image on local disk
    root: str  # the checkpoint the user named
    slo: Slo = Slo()
    note: str = ""  # what a user should know of its weights
    base: ModelId | None = None  # of an adapter: the model that it is run with

    def shard(self, rank: int) -> ModelSpec:
        """The part of the model that one of its ranks loads."""
        if self.manifest.ranks == 1:
            return self
        sums = self.manifest.checksums
        each = len(sums) // self.manifest.ranks
        own = replace(self.manifest, checksums=sums[rank * each : (rank + 1) * each])
        return replace(self, manifest=own, image_path=self.image_path.removesuffix(image_name()) + image_name(rank))

    def without_tensors(self) -> ModelSpec:
        """The part that schedulers and accounts need; it cannot be loaded."""
        return replace(self, manifest=replace(self.manifest, tensors=(), checksums=b""), directory="", image_path="")
