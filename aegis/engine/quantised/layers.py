"""Linear layers over quantised weights that lie in a weight image, in five forms.

A form is how the integers lie: as a processor multiplies them best, or in plain rows, which every device can read. The
name of a layer's tensor of integers tells the form, so an image says by itself what has to be built over it.

Few rows of input are multiplied by a kernel that reads packed integers. Many are multiplied by the dense product with
tiles of the weight that are dequantised on the way; from how many on was measured (docs/quantised.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, NamedTuple

import torch
from torch.nn.functional import linear

from aegis.core.errors import ModelRefused
from aegis.core.model import GROUPS, TensorEntry
from aegis.engine.cpu import products
from aegis.engine.cpu.library import INT4, INT8, Linear
from aegis.engine.packed_linear import bytes_of, described
from aegis.engine.quantised import digits
from aegis.engine.quantised.blocks import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    bytes_are_known,
    halves_are_known,
    of_bytes,
    of_halves,
    of_split,
)
from aegis.engine.quantised.integers import Integers, check, whole

_SCALES = "scales"
_TILE_ROWS = 512

_TILE_ELEMENTS = 1 << 20

DIGITS_ROWS_MAX = 256
"""With more rows of input the dense product with dequantised tiles is faster than products of bytes."""

INT8_ROWS_MAX = 12
"""With more rows of input the dense product with dequantised tiles is faster than torch's kernel for 8 bits."""

INT8_GROUPS_ROWS_MAX = 128
"""The same of 8 bits in groups, whose halves are multiplied by torch's kernel for 4 bits."""

INT4_ROWS_MAX = 64
"""The same for 4 bits."""


class Part(NamedTuple):
    """A tensor of a layer, as a weight image stores it; `packing` is oneDNN's description of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    content: torch.Tensor
    packing: bytes = b""

    @staticmethod
    def of(name: str, tensor: torch.Tensor) -> Part:
        return Part(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor)


class QuantisedLinear(torch.nn.Module):
    """Stands in for a linear layer. Its tensors are bound later, as those of any module are."""

    INTEGERS: ClassVar[str]

    def __init__(self, replaced: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = replaced.in_features, replaced.out_features
        self.bias = replaced.bias
        self.register_buffer(self.INTEGERS, torch.empty(0, device="meta"))
        self.register_buffer(_SCALES, torch.empty(0, device="meta"))
        self._compiled: tuple[torch.Tensor, Linear | None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.numel():  # of the last layer, where no row of a step samples
            return x.new_empty(*x.shape[:-1], self.out_features)
        rows = x.reshape(-1, self.in_features)
        return self.multiply(rows).view(*x.shape[:-1], self.out_features)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """The product of `x [rows, in]` with the weight."""
        raise NotImplementedError

    def compiled(self, form: int, integers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> Linear | None:
        """This layer as compiled products take it, without its bias; None: they do not."""
        if self._compiled is None or self._compiled[0] is not integers:
            shape = (self.out_features, self.in_features)
            self._compiled = integers, products.linear_of(form, integers, scales, shape, dtype)
        return self._compiled[1]

    def _biased(self, product: torch.Tensor) -> torch.Tensor:
        return product if self.bias is None else product.add_(self.bias)


class Int8Digits(QuantisedLinear):
    """8 bits, a scale a row, for processors that multiply bytes."""

    INTEGERS = "int8_digits"
    int8_digits: torch.Tensor
    scales: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.compiled(INT8, self.int8_digits, self.scales, x.dtype) is not None:
            return super().forward(x)
        if not 0 < x.numel() <= digits.ROWS_MAX * self.in_features:
            return super().forward(x)
        product = digits.product(digits.digits_once(x), self.int8_digits, self.scales)
        return self._biased(product.to(x.dtype)).view(*x.shape[:-1], self.out_features)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        if (linear_8 := self.compiled(INT8, self.int8_digits, self.scales, x.dtype)) is not None:
            return self._biased(products.product(x, linear_8))
        in_blocks = self.out_features % BLOCK_ROWS == 0 and self.in_features % BLOCK_COLUMNS == 0
        out = torch.empty(len(x), self.out_features, dtype=x.dtype)
        if len(x) > DIGITS_ROWS_MAX and in_blocks and bytes_are_known():
            packed, shape = bytes_of(self.int8_digits), (self.out_features, self.in_features)
            for start, stop in _tiles(shape):
                weight = of_bytes(packed, shape, start, stop).to(x.dtype)
                torch.mul(linear(x, weight), self.scales[start:stop], out=out[:, start:stop])
            return self._biased(out)
        for start in range(0, len(x), digits.ROWS_MAX):
            piece = digits.digits_of(x[start : start + digits.ROWS_MAX])
            out[start : start + digits.ROWS_MAX] = digits.product(piece, self.int8_digits, self.scales)
        return self._biased(out)

    @staticmethod
    def parts(integers: Integers, dtype: torch.dtype) -> list[Part]:
        packing, content = described(torch.ops.onednn.qlinear_prepack(integers.values.contiguous(), None))
        packed = Part(Int8Digits.INTEGERS, "int8", integers.shape, content, packing)
        return [packed, Part.of(_SCALES, integers.scales.float().view(-1))]


class Int8Rows(QuantisedLinear):
    """8 bits in rows, of groups of any size."""

    INTEGERS = "int8_rows"
    int8_rows: torch.Tensor
    scales: torch.Tensor

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        one = self.scales.shape[1] == 1
        if one and whole(self.int8_rows) and len(x) <= INT8_ROWS_MAX and x.device.type == "cpu":
            return self._biased(torch.ops.aten._weight_int8pack_mm(x, self.int8_rows, self.scales.view(-1)))
        out = torch.empty(len(x), self.out_features, dtype=x.dtype, device=x.device)
        for start in range(0, self.out_features, _TILE_ROWS):
            tile, scales = self.int8_rows[start : start + _TILE_ROWS], self.scales[start : start + _TILE_ROWS]
            if one:
                out[:, start : start + len(tile)] = linear(x, tile.to(x.dtype)).mul_(scales.view(-1))
            else:
                weight = tile.to(x.dtype).view(len(tile), scales.shape[1], -1) * scales.unsqueeze(-1)
                out[:, start : start + len(tile)] = linear(x, weight.view(tile.shape))
        return self._biased(out)

    @staticmethod
    def parts(integers: Integers, dtype: torch.dtype) -> list[Part]:
        return [Part.of(Int8Rows.INTEGERS, integers.values), Part.of(_SCALES, integers.scales.to(dtype))]


class Int8Halves(QuantisedLinear):
    """8 bits in groups, in the order in which torch's kernel for 4 bits reads them: first the upper halves of all, 16
    times as much worth, and then the lower ones."""

    INTEGERS = "int8_halves"
    int8_halves: torch.Tensor
    scales: torch.Tensor  # [groups, 2 * out, 2], zeros beside them

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        count = self.out_features
        if len(x) <= INT8_GROUPS_ROWS_MAX or count % BLOCK_ROWS or not halves_are_known():
            group = self.in_features // len(self.scales)
            run = torch.ops.aten._weight_int4pack_mm_for_cpu
            both = run(x.contiguous(), self.int8_halves, group, self.scales)
            return self._biased(both[:, :count] + both[:, count:])
        out = torch.empty(len(x), count, dtype=x.dtype)
        upper, lower = self.int8_halves.view(2, count, -1)
        scales = self.scales[:, count:, 0]
        for start, stop in _tiles((count, self.in_features)):
            out[:, start:stop] = linear(x, of_split(upper[start:stop], lower[start:stop], scales[:, start:stop]))
        return self._biased(out)

    @staticmethod
    def parts(integers: Integers, dtype: torch.dtype) -> list[Part]:
        values, scales = integers.values.to(torch.int16), integers.scales
        both = torch.cat(((values >> 4) + 8, values & 15)).to(torch.int8)
        zeros = torch.cat((torch.zeros_like(scales), scales * 8))
        packed, held = Int4Blocks.parts(Integers(4, both, torch.cat((scales * 16, scales)), zeros), dtype)
        return [packed._replace(name=Int8Halves.INTEGERS), held]


class Int4Blocks(QuantisedLinear):
    """4 bits in the order in which torch's kernel for processors reads them."""

    INTEGERS = "int4_blocks"
    int4_blocks: torch.Tensor
    scales: torch.Tensor  # [groups, out, 2], zeros beside them

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        if (linear_4 := self.compiled(INT4, self.int4_blocks, self.scales, x.dtype)) is not None:
            return self._biased(products.product(x, linear_4))
        if len(x) <= INT4_ROWS_MAX or self.out_features % BLOCK_ROWS or not halves_are_known():
            group = self.in_features // len(self.scales)
            run = torch.ops.aten._weight_int4pack_mm_for_cpu
            return self._biased(run(x.contiguous(), self.int4_blocks, group, self.scales))
        out = torch.empty(len(x), self.out_features, dtype=x.dtype)
        for start, stop in _tiles((self.out_features, self.in_features)):
            weight = of_halves(self.int4_blocks[start:stop], self.scales[:, start:stop])
            out[:, start:stop] = linear(x, weight)
        return self._biased(out)

    @staticmethod
    def parts(integers: Integers, dtype: torch.dtype) -> list[Part]:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers.values.int(), 1)
        scales = _with_zeros(integers, dtype).transpose(0, 1).contiguous()
        return [Part.of(Int4Blocks.INTEGERS, packed), Part.of(_SCALES, scales)]


class Int4Rows(QuantisedLinear):
    """4 bits in rows, two neighbours in a byte."""

    INTEGERS = "int4_rows"
    int4_rows: torch.Tensor
    scales: torch.Tensor  # [out, groups, 2], zeros beside them

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), self.out_features, dtype=x.dtype, device=x.device)
        for start in range(0, self.out_features, _TILE_ROWS):
            tile, scales = self.int4_rows[start : start + _TILE_ROWS], self.scales[start : start + _TILE_ROWS]
            values = torch.stack((tile & 15, tile >> 4), -1).to(x.dtype).view(len(tile), scales.shape[1], -1) - 8
            weight = torch.addcmul(scales[..., 1:], values, scales[..., :1])
            out[:, start : start + len(tile)] = linear(x, weight.view(len(tile), self.in_features))
        return self._biased(out)

    @staticmethod
    def parts(integers: Integers, dtype: torch.dtype) -> list[Part]:
        low, high = integers.values[:, ::2].to(torch.uint8), integers.values[:, 1::2].to(torch.uint8)
        return [Part.of(Int4Rows.INTEGERS, low | high << 4), Part.of(_SCALES, _with_zeros(integers, dtype))]


_ALL = (Int8Digits, Int8Halves, Int8Rows, Int4Blocks, Int4Rows)
FORMS: dict[str, type[QuantisedLinear]] = {form.INTEGERS: form for form in _ALL}


def parts(integers: Integers, dtype: torch.dtype, *, packs: bool) -> list[Part]:
    """What a weight image stores of a linear layer with this weight, that is to multiply inputs of `dtype`: if it
    `packs`, as this machine's processor reads it best, else as every device can read it. Raises ValueError if they are
    none."""
    check(integers)
    packs = packs and whole(integers.values)
    if integers.bits == 8:
        one = integers.scales.shape[1] == 1
        if packs and not one and integers.group in GROUPS and 16 * integers.scales.max() <= torch.finfo(dtype).max:
            return Int8Halves.parts(integers, dtype)
        return (Int8Digits if packs and one and digits.supported() else Int8Rows).parts(integers, dtype)
    packs = packs and integers.group in GROUPS
    return (Int4Blocks if packs else Int4Rows).parts(integers, dtype)


def replace_layers(module: torch.nn.Module, tensors: Iterable[TensorEntry]) -> None:
    """Puts layers of their form in the places of those whose integers are among these tensors. Raises ModelRefused."""
    for entry in tensors:
        for name in entry.names:
            path, _, leaf = name.rpartition(".")
            if leaf in FORMS:
                owner, _, own = path.rpartition(".")
                layer = module.get_submodule(path)
                if not isinstance(layer, torch.nn.Linear):
                    raise ModelRefused(f"{path} is quantised and no linear layer")
                setattr(module.get_submodule(owner), own, FORMS[leaf](layer))


def _tiles(shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Ranges of rows, whole blocks, whose weight stays in a cache."""
    rows, columns = shape
    size = max(_TILE_ELEMENTS // columns // BLOCK_ROWS, 1) * BLOCK_ROWS
    for start in range(0, rows, size):
        yield start, min(start + size, rows)


def _with_zeros(integers: Integers, dtype: torch.dtype) -> torch.Tensor:
    zeros = torch.zeros_like(integers.scales) if integers.zeros is None else integers.zeros
    return torch.stack((integers.scales, zeros), -1).to(dtype)
