"""Checkpoints that the packages themselves made, which run without a GPU: what is read of them is what they dequantise.

`gptqmodel` and `autoawq` are not used: imported they need some twenty packages more (`datasets` and `accelerate` among
them), and AWQ's is not maintained any more. `tests/quantised_checkpoints.py` packs as their formats say, bit by bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aegis.models.checkpoint import open_checkpoint
from aegis.models.loading import load
from tests import quantised_checkpoints as made
from tests.long_forms import first_of
from tests.unit.models.quantised.served import answers_as, registered

compressors = pytest.importorskip("compressed_tensors.compressors")
quantization = pytest.importorskip("compressed_tensors.quantization")


def compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> made.Pack:
    arguments = quantization.QuantizationArgs(**weights)
    inputs = quantization.QuantizationArgs(**activations) if activations else None
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments, input_activations=inputs)
    compressor = compressors.BaseCompressor.get_value_from_registry(form)

    def pack(weight: torch.Tensor) -> made.Layer:
        size = weights.get("group_size") or weight.shape[1]
        if weights["strategy"] == "block":
            high, wide = weights["block_structure"]
            least = -torch.nn.functional.max_pool2d(-weight[None], (high, wide))[0]
            most = torch.nn.functional.max_pool2d(weight[None], (high, wide))[0]
        else:
            grouped = weight.view(len(weight), -1, size)
            least, most = grouped.amin(-1), grouped.amax(-1)
        scales, zeros = quantization.utils.calculate_qparams(least, most, arguments)
        state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
        stored = compressor.compress(state, scheme)
        whole = compressor.decompress(stored, scheme)["weight"]
        return made.Layer(stored, whole.float())

    return pack


INT8_INPUTS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FP8_INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
COMPRESSED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None, str]] = {
    "W4A16": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True},
        None,
        "compressed-tensors int4 of groups of 128, runs as int4",
    ),
    "W4A16, asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
        None,
        "compressed-tensors int4 of groups of 32, runs as int4",
    ),
    "W8A16": (
        "pack-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        None,
        "compressed-tensors int8 of rows, runs as int8",
    ),
    "W8A8": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        INT8_INPUTS,
        "compressed-tensors int8 of rows, runs as int8",
    ),
    "FP8": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        FP8_INPUTS,
        "compressed-tensors FP8, runs as float32",
    ),
    "FP8 blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32], "symmetric": True},
        FP8_INPUTS,
        "compressed-tensors FP8, runs as float32",
    ),
}


@pytest.mark.parametrize("name", first_of(2, list(COMPRESSED)))
def test_compressed_tensors(name: str, tmp_path: Path) -> None:
    form, weights, activations, note = COMPRESSED[name]
    settings = made.compressed_config(form, weights)
    settings["config_groups"]["group_0"]["input_activations"] = activations
    reference = made.write(tmp_path / "m", "llama", settings, compressed(form, weights, activations))
    _is_read(tmp_path / "m", reference, note)


@pytest.mark.parametrize("preset", ["MXFP4", "NVFP4"])
def test_compressed_tensors_floats_of_4_bits(preset: str, tmp_path: Path) -> None:
    """The package rounds what it unpacks to bfloat16, unless it is told otherwise."""
    form = f"{preset.lower()}-pack-quantized"
    scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
    compressor = compressors.BaseCompressor.get_value_from_registry(form)

    def pack(weight: torch.Tensor) -> made.Layer:
        grouped = weight.view(len(weight), -1, scheme.weights.group_size)
        least, most = grouped.amin(-1), grouped.amax(-1)
        shared = quantization.utils.generate_gparam(least.min(), most.max()).view(1) if preset == "NVFP4" else None
        scales, _ = quantization.utils.calculate_qparams(least, most, scheme.weights, shared)
        whole = {} if shared is None else {"weight_global_scale": shared, "input_global_scale": shared.clone()}
        stored = compressor.compress({"weight": weight, "weight_scale": scales, **whole}, scheme)
        packed = stored["weight_packed"]
        numbers = compressors.unpack_fp4_from_uint8(packed, len(packed), packed.shape[1] * 2, torch.float32)
        scales = compressor._decompress_scale(stored["weight_scale"], torch.float32)
        dequantised = quantization.lifecycle.forward.dequantize(
            x_q=numbers, scale=scales, args=scheme.weights, global_scale=shared, dtype=torch.float32
        )
        unpacked = compressor.decompress(stored, scheme)["weight"]
        torch.testing.assert_close(unpacked.float(), dequantised, rtol=1e-2, atol=0)
        return made.Layer(stored, dequantised)

    settings = made.compressed_config(form, scheme.weights.model_dump(mode="json"))
    reference = made.write(tmp_path / "m", "llama", settings, pack)
    _is_read(tmp_path / "m", reference, f"compressed-tensors {preset}, runs as float32")


@pytest.fixture
def bitsandbytes() -> Any:
    """Imported where it is needed: that takes three seconds, and each process of the suite reads each file."""
    return pytest.importorskip("bitsandbytes.functional")


def looked_up(bitsandbytes: Any, kind: str, *, twice: bool, blocksize: int, of: torch.dtype) -> made.Pack:
    def pack(weight: torch.Tensor) -> made.Layer:
        stored, state = bitsandbytes.quantize_4bit(
            weight.to(of), blocksize=blocksize, compress_statistics=twice, quant_type=kind
        )
        tensors = {f"weight.{leaf}": tensor for leaf, tensor in state.as_dict(packed=True).items()}
        state.dtype = torch.float32
        return made.Layer({"weight": stored, **tensors}, bitsandbytes.dequantize_4bit(stored, state).float())

    return pack


@pytest.mark.parametrize("twice", first_of(1, [True, False]))
@pytest.mark.parametrize("kind", first_of(1, ["nf4", "fp4"]))
@pytest.mark.parametrize(("blocksize", "of"), [(64, torch.bfloat16), (128, torch.float32)])
def test_bitsandbytes_of_4_bits(
    bitsandbytes: Any, kind: str, twice: bool, blocksize: int, of: torch.dtype, tmp_path: Path
) -> None:
    """Without larger blocks: where a block is longer than a row, 0.50 gives on processors other weights than it got."""
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    settings |= {"bnb_4bit_use_double_quant": twice}
    pack = looked_up(bitsandbytes, kind, twice=twice, blocksize=blocksize, of=of)
    reference = made.write(tmp_path / "m", "qwen2", settings, pack)
    told = f"bitsandbytes {kind}, scales quantised too" if twice else f"bitsandbytes {kind}"
    _is_read(tmp_path / "m", reference, f"{told}, runs as float32")


def test_bitsandbytes_of_8_bits(bitsandbytes: Any, tmp_path: Path) -> None:
    def pack(weight: torch.Tensor) -> made.Layer:
        stored, scales, _ = bitsandbytes.int8_vectorwise_quant(weight.half())
        return made.Layer({"weight": stored, "SCB": scales}, bitsandbytes.int8_vectorwise_dequant(stored, scales))

    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    reference = made.write(tmp_path / "m", "llama", settings, pack)
    _is_read(tmp_path / "m", reference, "bitsandbytes int8, runs as int8")


def _is_read(path: Path, reference: Any, note: str) -> None:
    """Within what the packages round themselves, some of them in other orders than the format's arithmetic."""
    loaded = load(open_checkpoint(path), "float32", keeps=True).model.state_dict()
    for name, weight in reference.state_dict().items():
        torch.testing.assert_close(loaded[name], weight, rtol=2e-6, atol=1e-7)
    spec = registered(path, packs=True)
    assert spec.note == note
    answers_as(spec, reference)
