"""What is wrong with a quantised checkpoint is said in one line, before anything is made of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aegis.core.errors import ModelRefused
from aegis.models.quantised.configuration import Scheme, scheme_of
from aegis.models.quantised.layers import read_weight
from tests import quantised_checkpoints as made
from tests.unit.models.quantised.served import nothing_registered, registered

Tensors = dict[str, torch.Tensor]
Damage = Callable[[Tensors], None]

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
PACKED = made.compressed_config("pack-quantized", {"num_bits": 4, "group_size": 32, "symmetric": False})
INT8 = made.compressed_config("int-quantized", {"num_bits": 8})
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
NVFP4 = made.compressed_config("nvfp4-pack-quantized", {"num_bits": 4, "group_size": 16})
STATE = "weight.quant_state.bitsandbytes__nf4"


def text(**state: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def looked_up(weight: torch.Tensor) -> made.Layer:
    """Tensors as bitsandbytes has them; which numbers does not matter here."""
    tensors = {
        "weight": torch.zeros(weight.numel() // 2, 1, dtype=torch.uint8),
        "weight.absmax": torch.zeros(weight.numel() // 64, dtype=torch.uint8),
        "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.nested_absmax": torch.ones(-(-weight.numel() // 64 // 256)),
        "weight.nested_quant_map": torch.linspace(-1, 1, 256),
        STATE: text(shape=list(weight.shape), blocksize=64, nested_blocksize=256, nested_offset=0.5),
    }
    return made.Layer(tensors, weight)


def floats_of_4_bits(weight: torch.Tensor) -> made.Layer:
    """Tensors as compressed-tensors has them."""
    rows, columns = weight.shape
    tensors = {
        "weight_packed": torch.zeros(rows, columns // 2, dtype=torch.uint8),
        "weight_scale": torch.ones(rows, columns // 16).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.ones(1),
    }
    return made.Layer(tensors, weight)


def powers_of_two(weight: torch.Tensor) -> made.Layer:
    rows, columns = weight.shape
    packed = torch.zeros(rows, columns // 2, dtype=torch.uint8)
    scales = torch.full((rows, columns // 32), 127, dtype=torch.uint8)
    return made.Layer({"weight_packed": packed, "weight_scale": scales}, weight)


FORMS: dict[str, tuple[dict[str, Any], made.Pack]] = {
    "gptq": (GPTQ, made.gptq(group=32)),
    "awq": (AWQ, made.awq(32)),
    "packed": (PACKED, made.packed(group=32, symmetric=False)),
    "int8": (INT8, made.int8(symmetric=False)),
    "fp8": (FP8, made.fp8((32, 32))),
    "nf4": (NF4, looked_up),
    "nvfp4": (NVFP4, floats_of_4_bits),
    "mxfp4": (made.compressed_config("mxfp4-pack-quantized", {"num_bits": 4, "group_size": 32}), powers_of_two),
}


def put(**changes: torch.Tensor) -> Damage:
    return lambda tensors: tensors.update({name: tensor for name, tensor in changes.items()})


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def state(**changes: Any) -> Damage:
    known = {"shape": [64, 96], "blocksize": 64, "nested_blocksize": 256, "nested_offset": 0.5}
    return lambda tensors: tensors.update({STATE: text(**known | changes)})


def without(name: str) -> Damage:
    return lambda tensors: tensors.__delitem__(name)


def infinite(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[0] = torch.inf
    return tensor


DAMAGED: dict[str, tuple[str, Damage, str]] = {
    "gptq, scales of another shape": ("gptq", changed("scales", lambda t: t[:, 1:]), "scales of shape .3, 63. do not"),
    "gptq, too few scales": (
        "gptq",
        changed("scales", lambda t: t[1:]),
        "do not go with a weight of .64, 96. in gr",
    ),
    "gptq, no scales": ("gptq", without("scales"), "its scales is missing"),
    "gptq, scales of a vector": ("gptq", changed("scales", lambda t: t[0]), "its scales is float16 of shape .64."),
    "gptq, endless scales": ("gptq", changed("scales", infinite), "its scales holds what is no finite number"),
    "gptq, zeros of another shape": ("gptq", changed("qzeros", lambda t: t[:2]), "qzeros of shape .2, 8. do not go"),
    "gptq, zeros of fewer bits": ("gptq", changed("qzeros", lambda t: t[:, :4]), "qzeros of shape .3, 4. do not go"),
    "gptq, zeros of floats": ("gptq", changed("qzeros", lambda t: t.float()), "its qzeros is float32 of shape"),
    "gptq, groups out of range": ("gptq", changed("g_idx", lambda t: t + 1), "its g_idx is not between 0 and 2"),
    "gptq, groups below": ("gptq", changed("g_idx", lambda t: t - 1), "its g_idx is not between 0 and 2"),
    "gptq, groups of fewer columns": ("gptq", changed("g_idx", lambda t: t[1:]), "g_idx of shape .95. does not go"),
    "gptq, groups of floats": ("gptq", changed("g_idx", lambda t: t.float()), "its g_idx is float32"),
    "gptq, nothing": ("gptq", changed("qweight", lambda t: t[:0]), "its qweight is int32 of shape .0, 64., not a"),
    "awq, zeros of another shape": ("awq", changed("qzeros", lambda t: t[:, 1:]), "qzeros of shape .3, 7. do not go"),
    "awq, scales of another shape": ("awq", changed("scales", lambda t: t.t().contiguous()), "do not go with"),
    "packed, a huge shape": ("packed", put(weight_shape=torch.tensor([64, 1 << 60])), "does not hold .64, 1152921504"),
    "packed, a negative shape": ("packed", put(weight_shape=torch.tensor([64, -96])), "does not hold .64, -96."),
    "packed, more rows": ("packed", put(weight_shape=torch.tensor([1 << 40, 96])), "does not hold .1099511627776, 96."),
    "packed, no shape": ("packed", without("weight_shape"), "weight_shape is not two whole numbers"),
    "packed, scales": ("packed", changed("weight_scale", lambda t: t[:5]), "weight_scale of shape .5, 3. does not go"),
    "packed, scales in no groups": (
        "packed",
        put(weight_scale=torch.ones(64, 5)),
        "weight_scale of shape .64, 5. d",
    ),
    "packed, zeros": (
        "packed",
        changed("weight_zero_point", lambda t: t[1:]),
        "weight_zero_point of shape .7, 3.",
    ),
    "int8, zeros out of range": (
        "int8",
        put(weight_zero_point=torch.full((64, 1), 300)),
        "not between -128 and 127",
    ),
    "int8, zeros of another shape": ("int8", put(weight_zero_point=torch.zeros(64, 2).char()), "does not go with"),
    "int8, of another type": ("int8", changed("weight", lambda t: t.int()), "its weight is int32, not int8 or FP8"),
    "fp8, scales": (
        "fp8",
        changed("weight_scale_inv", lambda t: t[1:]),
        "do not go with a weight of .64, 96. and",
    ),
    "fp8, of another type": (
        "fp8",
        changed("weight", lambda t: t.to(torch.float8_e5m2)),
        "is float8_e5m2, not float8",
    ),
    "nf4, a huge shape": ("nf4", state(shape=[1 << 40, 96]), "does not hold .1099511627776, 96. of 4 bits"),
    "nf4, no shape": ("nf4", state(shape=[-64, -96]), "its quant_state has the shape"),
    "nf4, no neighbours": ("nf4", state(blocksize=0), "its quant_state has the blocksize 0"),
    "nf4, no JSON": (
        "nf4",
        changed(STATE, lambda _: text()[:1]),
        "not readable as JSON",
    ),
    "nf4, too few scales": ("nf4", changed("weight.absmax", lambda t: t[1:]), "its absmax has 95 scales, not 96"),
    "nf4, a short book": ("nf4", changed("weight.quant_map", lambda t: t[1:]), "its quant_map has 15 numbers, not 16"),
    "nvfp4, scales": ("nvfp4", changed("weight_scale", lambda t: t[:, 1:]), "weight_scale of shape .64, 5. does not"),
    "nvfp4, scales that are no numbers": ("nvfp4", put(weight_global_scale=torch.zeros(1)), "no finite number"),
    "nvfp4, several numbers": ("nvfp4", put(weight_global_scale=torch.ones(2)), "has the shape .2., not one number"),
    "nvfp4, no divisor": ("nvfp4", without("weight_global_scale"), "its weight_scale is float8_e4m3fn of shape"),
    "nvfp4, no matrix": ("nvfp4", changed("weight_packed", lambda t: t.view(-1)), "not a matrix of uint8"),
    "mxfp4, scales": ("mxfp4", changed("weight_scale", lambda t: t[1:]), "weight_scale of shape .63, 3. does not go"),
    "mxfp4, no numbers": ("mxfp4", changed("weight_scale", lambda t: t + 128), "is not between 0 and 254"),
    "nf4, nested": ("nf4", changed("weight.nested_quant_map", lambda t: t[1:]), "its nested_absmax, nested_quant_map"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_tensors_that_do_not_go_together_are_refused(name: str) -> None:
    form, damage, said = DAMAGED[name]
    settings, pack = FORMS[form]
    scheme = scheme_of({"quantization_config": settings})
    assert isinstance(scheme, Scheme)
    tensors = dict(pack(torch.randn(64, 96, generator=torch.Generator().manual_seed(1))).tensors)
    assert read_weight(scheme, tensors).shape == (64, 96)
    damage(tensors)
    with pytest.raises(ModelRefused, match=said):
        read_weight(scheme, tensors)


CONFIGURED: dict[str, tuple[Any, str]] = {
    "unknown": (
        {"quant_method": "aqlm"},
        "it is quantised by 'aqlm', which is not read: GPTQ, AWQ, ",
    ),
    "nothing": ({}, "it is quantised by None, which is not read"),
    "a list": ({"quant_method": ["gptq"]}, r"it is quantised by \['gptq'\], which is not read"),
    "no object": ([1], "quantization_config is no object"),
    "bits": (GPTQ | {"bits": 5}, "quantization_config.bits is 5; 2, 3, 4 and 8 are read"),
    "bits of AWQ": (AWQ | {"bits": 3}, "quantization_config.bits is 3; 4 is read"),
    "true bits": (GPTQ | {"bits": True}, "quantization_config.bits is True"),
    "groups": (GPTQ | {"group_size": 0}, "quantization_config.group_size is 0, and no size of a group"),
    "huge groups": (GPTQ | {"group_size": 1 << 62}, "and no size of a group"),
    "marlin": (
        GPTQ | {"checkpoint_format": "marlin"},
        "a GPTQ checkpoint of format 'marlin'; gptq and gptq_v2 are",
    ),
    "gemv": (AWQ | {"version": "gemv"}, "an AWQ checkpoint of version 'gemv'; gemm is read"),
    "mxfp6": (
        made.compressed_config("mxfp6-pack-quantized", {"num_bits": 6}),
        "of format 'mxfp6-pack-quantized',",
    ),
    "nvfp4 of other groups": (
        made.compressed_config("nvfp4-pack-quantized", {"num_bits": 4, "group_size": 32}),
        "quantization_config.group_size is 32; 16 is read",
    ),
    "no groups": (PACKED | {"config_groups": {}}, "config_groups names no groups of layers"),
    "no weights": (PACKED | {"config_groups": {"a": {"weights": None}}}, "says nothing of weights"),
    "sparse": (PACKED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "are sparse .'sparse-24-bitmask'."),
    "rotated": (PACKED | {"transform_config": {"config_groups": {"u": {}}}}, "has a transform_config"),
    "e5m2": (FP8 | {"fmt": "e5m2"}, "its weights are FP8 of format 'e5m2'; e4m3 is read"),
    "blocks": (FP8 | {"weight_block_size": [0, 128]}, "and no two sizes of blocks"),
    "af4": (NF4 | {"bnb_4bit_quant_type": "af4"}, "its weights are bitsandbytes 'af4'; nf4, fp4 and int8 are read"),
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_formats_that_are_not_read_are_named(name: str) -> None:
    settings, said = CONFIGURED[name]
    with pytest.raises(ModelRefused, match=said):
        scheme_of({"quantization_config": settings})


def test_what_is_not_quantised_has_no_scheme() -> None:
    assert scheme_of({}) is None and scheme_of({"quantization_config": None}) is None


LAYER = "model.layers.1.mlp.up_proj"
REGISTERED: dict[str, tuple[dict[str, Any], Damage | None, dict[str, Any], str]] = {
    "scales": (GPTQ, changed(f"{LAYER}.scales", lambda t: t[1:]), {}, f"{LAYER}: scales of shape"),
    "unknown": ({"quant_method": "hqq"}, None, {}, "it is quantised by 'hqq', which is not read"),
    "twice": (GPTQ, lambda t: t.update({f"{LAYER}.weight": torch.zeros(2)}), {}, f"{LAYER} has a quantised weight and"),
    "a layer less": (GPTQ, without(f"{LAYER}.qweight"), {}, f"{LAYER}: its qweight is missing"),
    "no place": (GPTQ, lambda t: t.update({f"{LAYER}.bias": torch.ones(96)}), {}, f"has no place for {LAYER}.bias"),
    "vLLM": (GPTQ, None, {"engine": "vllm"}, "vLLM has gptq weights in memory of its own once loaded"),
}


@pytest.mark.parametrize("name", REGISTERED)
def test_nothing_is_left_of_what_is_refused(name: str, tmp_path: Path) -> None:
    settings, damage, options, said = REGISTERED[name]
    made.write(tmp_path / "m", "llama", settings, made.gptq(group=32), damage=damage)
    with pytest.raises(ModelRefused, match=said) as caught:
        registered(tmp_path / "m", **options)
    assert caught.value.message.startswith(f"{tmp_path / 'm'}: ") and "\n" not in caught.value.message
    assert nothing_registered(tmp_path / "m")
