"""Checkpoint to weight image: all tensors of a model in one file, aligned, in the order of its modules.

`image.bin` holds every parameter and buffer, including those that no checkpoint stores (rotary frequencies), each tied
tensor once, each at a multiple of TENSOR_ALIGNMENT_BYTES. `manifest.json` holds the place of each. The image is raw
bytes, nothing that could run. To make the model's weights available then takes one copy.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import msgspec
import torch
from msgspec import Struct
from msgspec.structs import replace
from transformers import PretrainedConfig, PreTrainedModel

from aegis.core.errors import ModelRefused
from aegis.core.model import (
    TENSOR_ALIGNMENT_BYTES,
    EngineName,
    KvLayer,
    KvShape,
    Manifest,
    Pooling,
    Quantised,
    TensorEntry,
    image_name,
)
from aegis.device.image_directory import CONFIG, GENERATION_CONFIG, MANIFEST
from aegis.device.image_file import checksums
from aegis.engine.packed_linear import pack
from aegis.engine.packed_linear import packs as can_pack
from aegis.engine.parallel.sharding import Cut, cuts, cuts_attention
from aegis.engine.quantised.integers import Integers
from aegis.engine.quantised.layers import parts as parts_of
from aegis.engine.stored_tensor import Stored
from aegis.models.kv_probe import Probed, context_tokens, vocabulary

SMALL_WEIGHT_ELEMENTS = 1 << 16
"""oneDNN's operator for packed weights costs some ten microseconds more per call."""

_Place = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


def write_image(
    model: PreTrainedModel,
    probed: Probed,
    fingerprint: str,
    checkpoint: Path,
    into: Path,
    *,
    ranks: int = 1,
    packs: bool = False,
    integers: Mapping[str, Integers] = MappingProxyType({}),
    quantised: Quantised | None = None,
    came: str = "",
) -> Manifest:
    """Writes image, manifest and the checkpoint's configuration files into the directory `into`. With several `ranks`
    there is an image for each; raises ModelRefused if they cannot share the model out. If it `packs`, weights are
    stored as this processor multiplies them the fastest, where that is faster. Linear layers by these names are stored
    as `integers`; the manifest tells what made them so, `quantised` here, or of a checkpoint that `came` so."""
    kv = KvShape(
        layers=_shared_out(model, probed.layers, ranks),
        dtype=str(probed.kv_dtype).removeprefix("torch."),
        itemsize=probed.kv_dtype.itemsize,
    )
    if ranks > 1:
        cut = cuts(model, ranks)
        parts = [[_part(tensor, cut, rank, ranks) for tensor in _distinct(model)] for rank in range(ranks)]
    else:
        parts = [list(_quantised(_distinct(model), integers, model, packs=packs))]
    write = partial(write_stored, quantised=quantised, came=came)
    return write(parts, model, kv, probed.vocab_size, fingerprint, checkpoint, into)


class Pooled(Struct, frozen=True):
    """What is known beforehand of a model that pools: nothing is probed."""

    pooling: Pooling
    context_tokens: int


def write_pooled_image(
    model: PreTrainedModel,
    pooled: Pooled,
    fingerprint: str,
    checkpoint: Path,
    into: Path,
    *,
    packs: bool = False,
    came: str = "",
) -> Manifest:
    """Writes the same for a model that pools, which keeps no KV."""
    parts = [[_packed(tensor, model) if packs else tensor for tensor in _distinct(model)]]
    kv = KvShape(layers=(), dtype="float32", itemsize=4)
    return write_stored(parts, model, kv, vocabulary(model), fingerprint, checkpoint, into, pooled=pooled, came=came)


def write_stored(
    parts: Sequence[Sequence[Stored]],
    model: PreTrainedModel,
    kv: KvShape,
    vocab_size: int,
    fingerprint: str,
    checkpoint: Path,
    into: Path,
    *,
    engine: EngineName = "transformers",
    pooled: Pooled | None = None,
    quantised: Quantised | None = None,
    came: str = "",
) -> Manifest:
    """Writes the same for these tensors of each rank, as `engine` lays them out; `model` is the checkpoint as
    transformers loads it."""
    entries = list(_laid_out(parts[0]))
    image_bytes = _aligned(entries[-1].offset + entries[-1].nbytes)
    images = [into / image_name(rank) for rank in range(len(parts))]
    for image, tensors in zip(images, parts, strict=True):
        pieces = ((entry.offset, tensor.content) for entry, tensor in zip(entries, tensors, strict=True))
        _write_bytes(image, image_bytes, pieces)
    manifest = Manifest(
        fingerprint=fingerprint,
        architecture=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        image_bytes=image_bytes,
        tensors=tuple(entries),
        kv=kv,
        context_tokens=pooled.context_tokens if pooled else context_tokens(model.config),
        vocab_size=vocab_size,
        eos_token_ids=() if pooled else _ends(model, vocab_size),
        hidden_size=model.config.get_text_config().hidden_size,
        intermediate_size=_intermediate_size(model.config.get_text_config()),
        parameters=sum(tensor.content.numel() for tensor in _distinct(model) if not tensor.buffer),
        engine=engine,
        checksums=b"".join(checksums(str(image)) for image in images),
        ranks=len(parts),
        pooling=pooled.pooling if pooled else None,
        quantised=quantised,
        came=came,
    )
    (into / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    for name in (CONFIG, GENERATION_CONFIG):
        if checkpoint != into and (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, into / name)
    return manifest


def write_tensors(image: Path, tensors: Sequence[Stored]) -> tuple[tuple[TensorEntry, ...], int]:
    """Writes an image of these tensors; where they are in it, and how many bytes it has."""
    entries = tuple(_laid_out(tensors))
    nbytes = _aligned(entries[-1].offset + entries[-1].nbytes)
    _write_bytes(image, nbytes, ((entry.offset, each.content) for entry, each in zip(entries, tensors, strict=True)))
    return entries, nbytes


def _shared_out(model: PreTrainedModel, layers: tuple[KvLayer, ...], ranks: int) -> tuple[KvLayer, ...]:
    """The KV of each rank. Raises ModelRefused if heads of KV are left over."""
    if ranks == 1 or not cuts_attention(model):
        return layers
    if odd := [layer.heads for layer in layers if layer.heads % ranks]:
        heads = "1 head" if odd[0] == 1 else f"{odd[0]} heads"
        raise ModelRefused(
            f"{type(model).__name__} has {heads} of KV in a layer, which {ranks} ranks cannot share; "
            "lower --tensor-parallel-size"
        )
    return tuple(replace(layer, heads=layer.heads // ranks) for layer in layers)


def _part(tensor: Stored, cut: Mapping[str, Cut], rank: int, ranks: int) -> Stored:
    """A rank's part. Tied tensors are cut alike, or not at all."""
    found = {cut.get(name) for name in tensor.names}
    if len(found) > 1:
        raise ModelRefused(f"{' and '.join(tensor.names)} are one tensor, of which ranks need different parts")
    own = found.pop()
    if own is None:
        return tensor
    return Stored.in_rows(tensor.names, own.part(tensor.content, rank, ranks), buffer=tensor.buffer)


def _quantised(
    tensors: Iterable[Stored], integers: Mapping[str, Integers], model: PreTrainedModel, *, packs: bool
) -> Iterator[Stored]:
    """The tensors, with the integers of these layers in the places of their weights."""
    for tensor in tensors:
        (layer, _, leaf), *tied = [name.rpartition(".") for name in tensor.names]
        if not tied and leaf == "weight" and layer in integers:
            for part in parts_of(integers[layer], model.dtype, packs=packs):
                yield Stored((f"{layer}.{part.name}",), part.dtype, part.shape, part.content, True, part.packing)
        else:
            yield _packed(tensor, model) if packs else tensor


def _packed(tensor: Stored, model: PreTrainedModel) -> Stored:
    """The weight of large linear layers in bfloat16 packed: its product with one row then takes 0.6 of the time. Not if
    it is looked up too, for it would be stored twice."""
    layers = [model.get_submodule(name.rpartition(".")[0]) for name in tensor.names]
    large = tensor.content.dtype == torch.bfloat16 and tensor.content.numel() >= SMALL_WEIGHT_ELEMENTS
    linear = all(type(layer) is torch.nn.Linear for layer in layers) and tensor.content.ndim == 2
    if not large or not linear or not can_pack(tensor.content):
        return tensor
    packing, content = pack(tensor.content)
    return tensor._replace(content=content, packing=packing)


def _distinct(model: PreTrainedModel) -> Iterator[Stored]:
    """Each tensor once, with all names it is bound to: tensors with the same storage, place, shape, strides and type
    are one."""
    named: dict[tuple[_Place, bool], tuple[list[str], torch.Tensor]] = {}
    parameters = ((name, tensor, False) for name, tensor in model.named_parameters(remove_duplicate=False))
    buffers = ((name, tensor, True) for name, tensor in model.named_buffers(remove_duplicate=False))
    for name, tensor, buffer in (*parameters, *buffers):
        place = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
        )
        named.setdefault((place, buffer), ([], tensor))[0].append(name)
    for (_, buffer), (names, tensor) in named.items():
        yield Stored.in_rows(names, tensor.detach(), buffer=buffer)


def _laid_out(tensors: Iterable[Stored]) -> Iterator[TensorEntry]:
    offset = 0
    for names, dtype, shape, content, buffer, packing in tensors:
        yield TensorEntry(names, dtype, shape, offset, content.nbytes, buffer, packing)
        offset = _aligned(offset + content.nbytes)


def _write_bytes(file: Path, nbytes: int, tensors: Iterable[tuple[int, torch.Tensor]]) -> None:
    with file.open("wb") as image:
        image.truncate(nbytes)
        for offset, tensor in tensors:
            image.seek(offset)
            image.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _ends(model: PreTrainedModel, vocab_size: int) -> tuple[int, ...]:
    """Many a `generation_config.json` has no more than how to sample."""
    named = (getattr(each, "eos_token_id", None) for each in (model.generation_config, model.config.get_text_config()))
    eos = next((each for each in named if each is not None), None)
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int for token in ends):
        raise ModelRefused(
            f"{GENERATION_CONFIG}: eos_token_id is {eos!r:.60}; it has to be a token id, or a list of some"
        )
    return tuple(token for token in ends if 0 <= token < vocab_size)  # no other can be generated


def _intermediate_size(config: PretrainedConfig) -> int:
    """The size for all layers: the largest if they differ, the customary one if the configuration has none."""
    size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return max(size) if isinstance(size, list) else int(size)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
