"""The weight of a layer from the tensors that a quantised checkpoint has of it. Everything is checked before it is made
larger than it is stored: a checkpoint may say anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from aegis.core.errors import ModelRefused
from aegis.models.quantised.bits import WORD_BITS, signed, unpacked
from aegis.models.quantised.bitsandbytes import read_bitsandbytes
from aegis.models.quantised.checks import finite, floats, integers, matrix
from aegis.models.quantised.configuration import Method, Scheme
from aegis.models.quantised.weights import Blocks, Grid, Looked, Weight

_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where in a word of AWQ each of eight neighbours is."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The floats of 4 bits without a sign (OCP Microscaling Formats 1.0, table 1); the fourth bit is the sign."""

_E8M0_BIAS, _E8M0_NAN = 127, 255

Tensors = Mapping[str, torch.Tensor]
"""By what follows the layer's name."""


def _gptq(scheme: Scheme, tensors: Tensors) -> Weight:
    """Words lie along columns of the weight's transpose."""
    words = matrix(tensors, "qweight", torch.int32)
    zeros = matrix(tensors, "qzeros", torch.int32)
    scales = floats(matrix(tensors, "scales"), "scales")
    rows, groups = words.shape[1], len(scales)
    bits = next((bits for bits in scheme.bits if zeros.shape[1] * WORD_BITS == rows * bits), 0)
    columns = words.shape[0] * WORD_BITS // bits if bits else 0
    if not bits or columns * bits != words.shape[0] * WORD_BITS:
        raise ModelRefused(
            f"qzeros of shape {list(zeros.shape)} do not go with qweight of {list(words.shape)} and {_bits(scheme)}"
        )
    _refuse_groups(scheme, scales.t(), (rows, columns))
    if len(zeros) != groups:
        raise ModelRefused(f"qzeros of shape {list(zeros.shape)} do not go with scales of {list(scales.shape)}")
    stored = unpacked(zeros, bits).t().to(torch.int16)
    points = (stored + scheme.zeros_less & (1 << bits) - 1) - (1 << bits - 1)
    values = signed(unpacked(words.t(), bits), bits)
    return Grid(bits, values, scales.t().contiguous(), points.contiguous(), _groups(tensors, "g_idx", columns, groups))


def _awq(scheme: Scheme, tensors: Tensors) -> Weight:
    """Words lie along rows of the weight's transpose."""
    words = matrix(tensors, "qweight", torch.int32)
    zeros = matrix(tensors, "qzeros", torch.int32)
    scales = floats(matrix(tensors, "scales"), "scales")
    (bits,) = scheme.bits
    columns, rows = words.shape[0], words.shape[1] * WORD_BITS // bits
    if zeros.shape[1] != words.shape[1] or len(zeros) != len(scales):
        raise ModelRefused(f"qzeros of shape {list(zeros.shape)} do not go with qweight of {list(words.shape)}")
    _refuse_groups(scheme, scales.t(), (rows, columns))

    def numbers(of: torch.Tensor) -> torch.Tensor:
        return unpacked(of, bits).view(len(of), -1, len(_AWQ_ORDER))[..., _AWQ_ORDER].view(len(of), rows).t()

    values, points = signed(numbers(words), bits).contiguous(), signed(numbers(zeros), bits).to(torch.int16)
    return Grid(bits, values, scales.t().contiguous(), points.contiguous())


def _compressed(scheme: Scheme, tensors: Tensors) -> Weight:
    packed = tensors.get("weight_packed")
    if packed is not None and packed.dtype == torch.uint8:
        return _floats_of_4_bits(tensors)
    scales = floats(tensors.get("weight_scale"), "weight_scale")
    if packed is not None:
        return _packed(scheme, tensors, scales)
    weight = matrix(tensors, "weight")
    if weight.dtype.is_floating_point:
        return _floats(weight, scales, scheme.block)
    if weight.dtype != torch.int8:
        raise ModelRefused(f"its weight is {_name(weight)}, not int8 or FP8")
    scales = _by_rows(scales, weight)
    zeros = tensors.get("weight_zero_point")
    if zeros is not None:
        zeros = _by_rows(integers(zeros, "weight_zero_point", (-128, 127)).to(torch.int16), weight)
        if zeros.shape != scales.shape:
            raise ModelRefused("weight_zero_point does not go with weight_scale")
    groups = _groups(tensors, "weight_g_idx", weight.shape[1], scales.shape[1])
    return Grid(8, weight, scales.contiguous(), zeros, groups)


def _packed(scheme: Scheme, tensors: Tensors, scales: torch.Tensor) -> Weight:
    words = matrix(tensors, "weight_packed", torch.int32)
    shape = tensors.get("weight_shape")
    if shape is None or shape.numel() != 2 or shape.dtype.is_floating_point:
        raise ModelRefused("weight_shape is not two whole numbers")
    rows, columns = (int(size) for size in shape.view(-1))
    fit = [bits for bits in scheme.bits if words.shape[1] == -(-columns * bits // WORD_BITS)]
    if not fit or rows != len(words) or columns < 1:
        raise ModelRefused(f"weight_packed of shape {list(words.shape)} does not hold [{rows}, {columns}]")
    bits, scales = fit[0], _by_rows(scales, torch.empty(rows, columns, device="meta"))
    zeros = tensors.get("weight_zero_point")
    if zeros is not None:
        packed = matrix(tensors, "weight_zero_point", torch.int32)
        if packed.shape != (-(-rows * bits // WORD_BITS), scales.shape[1]):
            raise ModelRefused(f"weight_zero_point of shape {list(packed.shape)} does not go with weight_scale")
        zeros = signed(unpacked(packed.t(), bits)[:, :rows].t(), bits).to(torch.int16).contiguous()
    values = signed(unpacked(words, bits)[:, :columns], bits)
    groups = _groups(tensors, "weight_g_idx", columns, scales.shape[1])
    return Grid(bits, values.contiguous(), scales.contiguous(), zeros, groups)


def _floats_of_4_bits(tensors: Tensors) -> Weight:
    """NVFP4, a scale of FP8 for 16 neighbours, all of them divided by one number; and MXFP4, a power of two for 32.
    The first of two neighbours is in the lower half of a byte."""
    packed = matrix(tensors, "weight_packed", torch.uint8)
    rows, columns = packed.shape[0], packed.shape[1] * 2
    stored = matrix(tensors, "weight_scale")
    if "weight_global_scale" in tensors:
        neighbours, scales = 16, floats(stored, "weight_scale")
        divisor = floats(tensors["weight_global_scale"], "weight_global_scale")
        if divisor.numel() != 1:
            raise ModelRefused(f"its weight_global_scale has the shape {list(divisor.shape)}, not one number")
        scales = finite(scales / divisor.view(()), "weight_scale")
    else:
        neighbours, exponents = 32, integers(stored, "weight_scale", (0, _E8M0_NAN - 1))
        scales = torch.ldexp(torch.ones(stored.shape), exponents.int() - _E8M0_BIAS)
    if scales.shape != (rows, columns // neighbours) or columns % neighbours:
        raise ModelRefused(f"weight_scale of shape {list(stored.shape)} does not go with a weight of {[rows, columns]}")
    book = torch.tensor([*_E2M1, *(-number for number in _E2M1)])
    return Looked((rows, columns), packed << 4 | packed >> 4, book, scales.reshape(-1), neighbours)


def _fp8(scheme: Scheme, tensors: Tensors) -> Weight:
    return _floats(matrix(tensors, "weight"), floats(tensors.get("weight_scale_inv"), "weight_scale_inv"), scheme.block)


def _floats(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None) -> Weight:
    if weight.dtype != torch.float8_e4m3fn:
        raise ModelRefused(f"its weight is {_name(weight)}, not float8_e4m3fn")
    rows, columns = weight.shape
    if scales.numel() == 1:
        block = rows, columns
    elif scales.shape in ((rows, 1), (rows,)):
        block = 1, columns
    if block is None or scales.numel() != -(-rows // block[0]) * -(-columns // block[1]):
        raise ModelRefused(
            f"scales of shape {list(scales.shape)} do not go with a weight of {list(weight.shape)}"
            + (f" and blocks of {list(block)}" if block else "")
        )
    return Blocks(weight, scales.reshape(-(-rows // block[0]), -(-columns // block[1])), block)


def _by_rows(scales: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`[out, groups]` of one for all, one for each row, or one for each group."""
    rows, columns = weight.shape
    if scales.numel() == 1:
        return scales.view(1, 1).expand(rows, 1)
    if scales.ndim == 1 and len(scales) == rows:
        return scales.view(rows, 1)
    if scales.ndim != 2 or len(scales) != rows or not scales.shape[1] or columns % scales.shape[1]:
        raise ModelRefused(f"weight_scale of shape {list(scales.shape)} does not go with a weight of {[rows, columns]}")
    return scales


def _refuse_groups(scheme: Scheme, scales: torch.Tensor, shape: tuple[int, int]) -> None:
    rows, columns = shape
    group = columns if scheme.group == -1 else scheme.group or columns // max(scales.shape[1], 1)
    if scales.shape[0] != rows or not group or columns % group or scales.shape[1] != columns // group:
        raise ModelRefused(
            f"scales of shape {list(scales.t().shape)} do not go with a weight of {[rows, columns]}"
            + (f" in groups of {scheme.group}" if scheme.group else "")
        )


def _groups(tensors: Tensors, name: str, columns: int, groups: int) -> torch.Tensor | None:
    """The group of each column, unless groups are neighbours. compressed-tensors has -1 where nobody said."""
    found = tensors.get(name)
    if found is None or (name == "weight_g_idx" and bool((found == -1).all())):
        return None
    if found.shape != (columns,):
        raise ModelRefused(f"{name} of shape {list(found.shape)} does not go with {columns} columns")
    found = integers(found, name, (0, groups - 1)).long()
    neighbours = torch.arange(columns) // (columns // groups)
    return None if torch.equal(found, neighbours) else found


def _bits(scheme: Scheme) -> str:
    return " or ".join(map(str, scheme.bits)) + " bits"


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


_READ: Mapping[Method, Callable[[Scheme, Tensors], Weight]] = {
    "awq": _awq,
    "bitsandbytes": lambda _, tensors: read_bitsandbytes(tensors),
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
}


def read_weight(scheme: Scheme, tensors: Tensors) -> Weight:
    """Raises ModelRefused if tensors are missing, do not go together, or hold what they cannot."""
    weight = _READ[scheme.method](scheme, tensors)
    if not all(weight.shape):
        raise ModelRefused(f"its weight has the shape {list(weight.shape)}")
    return weight
