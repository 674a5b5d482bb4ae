"""Images hold every tensor of a model, bit for bit, once."""

from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch

from aegis.core.model import IMAGE_PIECE_BYTES, TENSOR_ALIGNMENT_BYTES, Manifest
from aegis.device.image_directory import read_manifest
from aegis.models.kv_probe import probe
from aegis.models.weight_image import write_image
from tests import checkpoints

ARCHITECTURES = ["llama", "gemma2", "phi3", "gpt2", "mixtral", "qwen3_moe"]


def written(
    tmp_path: Path, model_type: str, dtype: torch.dtype = torch.float32, **changes: Any
) -> tuple[torch.nn.Module, Manifest, bytes]:
    model = checkpoints.model(model_type, dtype=dtype, **changes)
    model.config.save_pretrained(tmp_path)
    into = tmp_path / "image"
    into.mkdir()
    manifest = write_image(model, probe(model), "name", tmp_path, into)
    return model, manifest, (into / "image.bin").read_bytes()


def raw(tensor: torch.Tensor) -> bytes:
    return np.ascontiguousarray(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy()).tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_parameter_and_buffer_is_there_bitwise(tmp_path: Path, model_type: str, dtype: torch.dtype) -> None:
    model, manifest, image = written(tmp_path, model_type, dtype)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    named = {name: (entry, entry.buffer) for entry in manifest.tensors for name in entry.names}
    assert named.keys() == parameters.keys() | buffers.keys()
    for name, (entry, is_buffer) in named.items():
        tensor = (buffers if is_buffer else parameters)[name]
        assert (entry.shape, entry.dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        assert image[entry.offset : entry.offset + entry.nbytes] == raw(tensor), name


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_tensors_are_aligned_and_apart(tmp_path: Path, model_type: str) -> None:
    _, manifest, image = written(tmp_path, model_type)
    end = 0
    for entry in manifest.tensors:
        assert entry.offset % TENSOR_ALIGNMENT_BYTES == 0
        assert end <= entry.offset
        end = entry.offset + entry.nbytes
    assert end <= manifest.image_bytes == len(image)
    pieces = [image[at : at + IMAGE_PIECE_BYTES] for at in range(0, len(image), IMAGE_PIECE_BYTES)]
    assert manifest.checksums == b"".join(crc32(piece).to_bytes(4, "little") for piece in pieces)
    assert manifest.image_bytes % TENSOR_ALIGNMENT_BYTES == 0


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    model, manifest, _ = written(tmp_path, "gpt2")
    tied = [entry.names for entry in manifest.tensors if len(entry.names) > 1]
    assert tied == [("transformer.wte.weight", "lm_head.weight")]
    assert manifest.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_rotary_frequencies_are_in_although_no_checkpoint_stores_them(tmp_path: Path) -> None:
    model, manifest, _ = written(tmp_path, "llama")
    assert "model.rotary_emb.inv_freq" not in model.state_dict()
    assert any("model.rotary_emb.inv_freq" in entry.names and entry.buffer for entry in manifest.tensors)


def test_the_manifest_describes_the_model(tmp_path: Path) -> None:
    _, manifest, _ = written(tmp_path, "llama", torch.bfloat16)
    assert (manifest.architecture, manifest.dtype, manifest.kv.dtype) == ("LlamaForCausalLM", "bfloat16", "bfloat16")
    assert manifest.kv.token_bytes == 2 * 2 * 2 * (16 + 16)  # itemsize, layers, heads, K and V
    assert (manifest.vocab_size, manifest.context_tokens) == (checkpoints.VOCAB_SIZE, 256)
    assert (manifest.hidden_size, manifest.intermediate_size, manifest.eos_token_ids) == (64, 96, (1,))


@pytest.mark.parametrize(("eos", "kept"), [([1, 5000], (1,)), (5000, ()), (-1, ())])
def test_ends_that_cannot_be_generated_are_left_out(tmp_path: Path, eos: object, kept: tuple[int, ...]) -> None:
    _, manifest, _ = written(tmp_path, "llama", eos_token_id=eos)
    assert manifest.eos_token_ids == kept


def test_a_manifest_is_read_back_only_with_a_whole_image(tmp_path: Path) -> None:
    _, manifest, image = written(tmp_path, "llama")
    into = tmp_path / "image"
    assert read_manifest(into, "name") == manifest
    assert read_manifest(into, "another") is None
    (into / "image.bin").write_bytes(image[:-1])
    assert read_manifest(into, "name") is None
    (into / "image.bin").write_bytes(image)
    (into / "manifest.json").write_text("{}")
    assert read_manifest(into, "name") is None
