"""Checkpoint to weight image: all tensors of a model in one file, aligned, in the order of its modules.

`image.bin` holds every parameter and buffer, those that no checkpoint stores (rotary frequencies) included, each tied
tensor once, each at a multiple of TENSOR_ALIGNMENT_BYTES. `manifest.json` says what lies where. Raw bytes, nothing
that could run. Making the model's weights available is then one copy.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import torch
from transformers import PretrainedConfig, PreTrainedModel

from aegis.core.model import TENSOR_ALIGNMENT_BYTES, KvShape, Manifest, TensorEntry
from aegis.device.image_file import checksums
from aegis.models.image_directory import CONFIG, GENERATION_CONFIG, IMAGE, MANIFEST
from aegis.models.probe import Probed, context_tokens

_Place = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


def write_image(model: PreTrainedModel, probed: Probed, fingerprint: str, checkpoint: Path, into: Path) -> Manifest:
    """Writes image, manifest and the checkpoint's configuration files into the directory `into`."""
    tensors = list(_distinct(model))
    entries = list(_laid_out(tensors))
    image_bytes = _aligned(entries[-1].offset + entries[-1].nbytes)
    _write_bytes(into / IMAGE, image_bytes, ((entry.offset, tensors[i][1]) for i, entry in enumerate(entries)))
    sums = checksums(str(into / IMAGE))
    manifest = _describe(model, probed, fingerprint, entries, image_bytes, sums)
    (into / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    for name in (CONFIG, GENERATION_CONFIG):
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, into / name)
    return manifest


def _distinct(model: PreTrainedModel) -> Iterator[tuple[tuple[str, ...], torch.Tensor, bool]]:
    """Each tensor once, with all names it is bound to: same storage, place, shape, strides and type is the same."""
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
        yield tuple(names), tensor.detach(), buffer


def _laid_out(tensors: Iterable[tuple[tuple[str, ...], torch.Tensor, bool]]) -> Iterator[TensorEntry]:
    offset = 0
    for names, tensor, buffer in tensors:
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield TensorEntry(names, dtype, tuple(tensor.shape), offset, tensor.nbytes, buffer)
        offset = _aligned(offset + tensor.nbytes)


def _write_bytes(file: Path, nbytes: int, tensors: Iterable[tuple[int, torch.Tensor]]) -> None:
    with file.open("wb") as image:
        image.truncate(nbytes)
        for offset, tensor in tensors:
            image.seek(offset)
            image.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        image.flush()
        os.fsync(image.fileno())  # or a power failure could leave a file of the right size and no content


def _describe(
    model: PreTrainedModel,
    probed: Probed,
    fingerprint: str,
    entries: list[TensorEntry],
    image_bytes: int,
    sums: bytes,
) -> Manifest:
    config = model.config.get_text_config()
    kv_dtype = str(probed.kv_dtype).removeprefix("torch.")
    eos = model.generation_config.eos_token_id if model.generation_config else config.eos_token_id
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return Manifest(
        fingerprint=fingerprint,
        architecture=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        image_bytes=image_bytes,
        tensors=tuple(entries),
        kv=KvShape(layers=probed.layers, dtype=kv_dtype, itemsize=probed.kv_dtype.itemsize),
        context_tokens=context_tokens(model.config),
        vocab_size=probed.vocab_size,
        eos_token_ids=tuple(token for token in ends if 0 <= token < probed.vocab_size),  # no other can be generated
        hidden_size=config.hidden_size,
        intermediate_size=_intermediate_size(config),
        parameters=sum(tensor.numel() for _, tensor, buffer in _distinct(model) if not buffer),
        checksums=sums,
    )


def _intermediate_size(config: PretrainedConfig) -> int:
    """One for all layers: the largest where they differ, the customary one where the configuration is silent."""
    size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return max(size) if isinstance(size, list) else int(size)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // TENSOR_ALIGNMENT_BYTES) * TENSOR_ALIGNMENT_BYTES
