"""The `quantization_config` of a checkpoint: which of the known formats its weights have, or why they are not read.

Only what decides what weights mean counts. How layers were chosen is seen from the tensors that they have, so patterns
of names, which anybody may write, are never matched. How activations would be quantised does not matter: they stay
floats here, which loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from msgspec import Struct

from aegis.core.errors import ModelRefused

Method = Literal["awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq"]

_KEYS = ("quantization_config", "compression_config")
_SHOWN = 60
_GROUP_MAX = 1 << 20
_FLOATS_OF_4_BITS = {"mxfp4-pack-quantized": ("MXFP4", 32), "nvfp4-pack-quantized": ("NVFP4", 16)}
"""Of compressed-tensors: what they are called, and for how many neighbours each of their scales holds."""


class Scheme(Struct, frozen=True):
    """`told` is the format, for people. Integers have one of these `bits`, floats so many. A scale holds for a `group`
    of neighbours, or for a row; None if it is seen from the tensors alone. Stored zero points are less by
    `zeros_less`. `block` is what shares a scale in both directions."""

    method: Method
    told: str
    bits: tuple[int, ...] = ()
    group: int | None = None
    zeros_less: int = 0
    block: tuple[int, int] | None = None
    float_bits: int = 8

    @property
    def growth(self) -> int:
        """How many times as many bytes its weights may be in numbers of 16 bits."""
        least = min((*self.bits, self.float_bits))
        return 16 // least + 16 % least


def comes_quantised(config: Mapping[str, Any]) -> bool:
    return any(config.get(key) is not None for key in _KEYS)


def scheme_of(config: Mapping[str, Any]) -> Scheme | None:
    """Of a `config.json`; None if its weights are numbers. Raises ModelRefused for what is not read."""
    found = next((config[key] for key in _KEYS if config.get(key) is not None), None)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise ModelRefused("config.json: quantization_config is no object")
    method = found.get("quant_method")
    if method is None and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        method = "bitsandbytes"  # before it was named
    if (read := READERS.get(method) if isinstance(method, str) else None) is None:
        raise ModelRefused(
            f"it is quantised by {_shown(method)}, which is not read: GPTQ, AWQ, compressed-tensors, fine-grained FP8 "
            "and bitsandbytes are"
        )
    return read(found)


def without_scheme(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _KEYS}


def _gptq(settings: dict[str, Any]) -> Scheme:
    known = {"gptq": 1, "gptq_v2": 0}
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if settings.get("is_marlin_format"):
        form = "marlin"
    if not isinstance(form, str) or form not in known:
        raise ModelRefused(f"it is a GPTQ checkpoint of format {_shown(form)}; gptq and gptq_v2 are read")
    bits = _one_of(settings, "bits", (2, 3, 4, 8))
    group = _group(settings, "group_size")
    told = f"GPTQ int{bits}{_of_groups(group)}"
    if settings.get("desc_act"):
        told += " in the order of activations"
    if settings.get("dynamic"):  # layers of other bits and groups, as their tensors tell
        return Scheme("gptq", told, (2, 3, 4, 8), None, known[form])
    return Scheme("gptq", told, (bits,), group, known[form])


def _awq(settings: dict[str, Any]) -> Scheme:
    form = settings.get("version") or settings.get("format") or "gemm"
    if not isinstance(form, str) or form.lower() != "gemm":
        raise ModelRefused(f"it is an AWQ checkpoint of version {_shown(form)}; gemm is read")
    bits = _one_of(settings, "bits" if "bits" in settings else "w_bit", (4,))
    group = _group(settings, "group_size" if "group_size" in settings else "q_group_size")
    return Scheme("awq", f"AWQ int{bits}{_of_groups(group)}", (bits,), group)


def _compressed(settings: dict[str, Any]) -> Scheme:
    known = ("float-quantized", "int-quantized", "mixed-precision", "naive-quantized", "pack-quantized")
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not 0 < len(groups) <= 64:
        raise ModelRefused("config.json: quantization_config.config_groups names no groups of layers, or too many")
    _refuse_transformed(settings)
    bits, told, float_bits = set[int](), list[str](), 8
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise ModelRefused("config.json: a group of quantization_config.config_groups says nothing of weights")
        form = group.get("format") or settings.get("format")
        if not isinstance(form, str) or form not in (*known, *_FLOATS_OF_4_BITS):
            raise ModelRefused(f"it is a compressed-tensors checkpoint of format {_shown(form)}, which is not read")
        if form in _FLOATS_OF_4_BITS:
            name, neighbours = _FLOATS_OF_4_BITS[form]
            _one_of(weights, "num_bits", (4,))
            _one_of(weights, "group_size", (neighbours,))
            float_bits = 4
            told.append(name)
            continue
        if weights.get("type") == "float":
            _one_of(weights, "num_bits", (8,))
            told.append("FP8")
            continue
        bits.add(_one_of(weights, "num_bits", (2, 4, 8)))
        size = weights.get("group_size")
        told.append(f"int{weights['num_bits']}{_of_groups(size if isinstance(size, int) and size > 0 else -1)}")
    named = " and ".join(sorted(set(told)))
    told_all, block = f"compressed-tensors {named}", _blocks(groups)
    return Scheme("compressed-tensors", told_all, tuple(sorted(bits)), block=block, float_bits=float_bits)


def _blocks(groups: Mapping[str, Any]) -> tuple[int, int] | None:
    found = {_block(group["weights"], "block_structure") for group in groups.values()}
    if len(found - {None}) > 1:
        raise ModelRefused("config.json: quantization_config has several block_structures")
    return next(iter(found - {None}), None)


def _refuse_transformed(settings: Mapping[str, Any]) -> None:
    sparse = settings.get("sparsity_config") or {}
    form = sparse.get("format", "dense") if isinstance(sparse, dict) else sparse
    if form not in (None, "dense"):
        raise ModelRefused(f"its weights are sparse ({_shown(form)}), which is not read")
    turned = settings.get("transform_config") or {}
    if not isinstance(turned, dict) or turned.get("config_groups"):
        raise ModelRefused("config.json: quantization_config has a transform_config, which is not read")


def _fp8(settings: dict[str, Any]) -> Scheme:
    if (form := settings.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
        raise ModelRefused(f"its weights are FP8 of format {_shown(form)}; e4m3 is read")
    return Scheme("fp8", "FP8", block=_block(settings, "weight_block_size"))


def _bitsandbytes(settings: dict[str, Any]) -> Scheme:
    if settings.get("load_in_8bit"):
        return Scheme("bitsandbytes", "bitsandbytes int8", (8,))
    kind = settings.get("bnb_4bit_quant_type") or "fp4"
    if kind not in ("nf4", "fp4"):
        raise ModelRefused(f"its weights are bitsandbytes {_shown(kind)}; nf4, fp4 and int8 are read")
    twice = ", scales quantised too" if settings.get("bnb_4bit_use_double_quant") else ""
    return Scheme("bitsandbytes", f"bitsandbytes {kind}{twice}", float_bits=4)


READERS: Mapping[str, Callable[[dict[str, Any]], Scheme]] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
}


def _one_of(settings: Mapping[str, Any], key: str, known: tuple[int, ...]) -> int:
    value = settings.get(key)
    if type(value) is not int or value not in known:
        *most, last = map(str, known)
        read = f"{', '.join(most)} and {last} are" if most else f"{last} is"
        raise ModelRefused(f"config.json: quantization_config.{key} is {_shown(value)}; {read} read")
    return value


def _group(settings: Mapping[str, Any], key: str) -> int:
    """-1 for a whole row."""
    value = settings.get(key, 128)
    if type(value) is not int or not (value == -1 or 0 < value <= _GROUP_MAX):
        raise ModelRefused(f"config.json: quantization_config.{key} is {_shown(value)}, and no size of a group")
    return value


def _block(settings: Mapping[str, Any], key: str) -> tuple[int, int] | None:
    value = settings.get(key)
    if value is None:
        return None
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(size) is int and 0 < size <= _GROUP_MAX for size in sizes):
        raise ModelRefused(f"config.json: quantization_config.{key} is {_shown(value)}, and no two sizes of blocks")
    return sizes[0], sizes[1]


def _of_groups(group: int) -> str:
    return f" of groups of {group}" if group > 0 else " of rows"


def _shown(value: object) -> str:
    return repr(value)[:_SHOWN]
