"""Compiled products of quantised layers are those of the weights that the integers stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aegis.core.model import WeightsName
from aegis.engine.cpu import products
from aegis.engine.cpu.library import NARROW, PACKED, Linear, library
from aegis.engine.packed_linear import packed_at
from aegis.engine.quantised.integers import Integers, dequantised, quantise
from aegis.engine.quantised.layers import FORMS, Int4Blocks, QuantisedLinear, parts
from aegis.engine.tensor_views import dtype_named

pytestmark = pytest.mark.skipif(library() is None, reason="not compiled here, or not for this processor")

ROWS, COLUMNS = 192, 320


def _layer(weights: WeightsName, columns: int) -> tuple[QuantisedLinear, torch.Tensor]:
    """With the weight that it stands for."""
    draws = torch.Generator().manual_seed(3)
    bias = torch.randn(ROWS, generator=draws).bfloat16()
    integers = quantise(torch.randn(ROWS, columns, generator=draws).bfloat16(), weights)
    assert integers is not None
    return _layer_of(integers, bias), dequantised(integers)


def _layer_of(integers: Integers, bias: torch.Tensor) -> QuantisedLinear:
    dense = torch.nn.Linear(integers.shape[1], ROWS, dtype=torch.bfloat16)
    dense.bias = torch.nn.Parameter(bias, requires_grad=False)
    stored = parts(integers, torch.bfloat16, packs=True)
    layer = FORMS[stored[0].name](dense)
    for part in stored:
        if part.packing:
            layer.register_buffer(f"{part.name}_bytes", part.content)
            tensor = packed_at(part.content.data_ptr(), part.shape, part.dtype, part.packing)
        else:
            tensor = part.content.view(dtype_named(part.dtype)).view(part.shape)
        setattr(layer, part.name, tensor)
    return layer


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 13, 49, 200])
@pytest.mark.parametrize(
    ("weights", "columns"), [("int8", 320), ("int8", 128), ("int4", 384), ("int4-g64", 320), ("int4-g32", 320)]
)
@torch.inference_mode()
def test_it_is_the_reference_s(weights: WeightsName, columns: int, rows: int) -> None:
    layer, weight = _layer(weights, columns)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).bfloat16()
    x[0, 0] = 40.0  # which coarsens the whole numbers of this row
    if layer.INTEGERS == Int4Blocks.INTEGERS and rows > 2:
        weight = weight.bfloat16()  # as torch's kernel and the layer's own ways make it
    exact = x.double() @ weight.double().t() + layer.bias.double()
    got = layer(x)
    assert layer._compiled is not None and layer._compiled[1] is not None
    off = (got.double() - exact).abs().amax() / exact.abs().amax()
    assert off < 2**-7


@pytest.mark.parametrize("rows", [1, 2, 3, 40])
@torch.inference_mode()
def test_eight_bits_may_be_any(rows: int) -> None:
    """Checkpoints of others have -128, which `quantise` makes never."""
    values = torch.arange(-128, 128).repeat(ROWS, 1).to(torch.int8)
    integers = Integers(8, values, torch.full((ROWS, 1), 0.5))
    x = torch.eye(256).bfloat16()[:rows]  # each row finds one column, and so the first one -128
    got = _layer_of(integers, torch.zeros(ROWS).bfloat16())(x)
    assert (got.float() - dequantised(integers)[:, :rows].t()).abs().amax() < 0.5


@pytest.mark.parametrize("rows", [1, 2, 3, 40])
@pytest.mark.parametrize("weights", ["int8", "int4-g64"])
@torch.inference_mode()
def test_of_what_is_no_number_nothing_is_made(weights: WeightsName, rows: int) -> None:
    """As in torch's own products, and in none of the other rows."""
    layer, _ = _layer(weights, COLUMNS)
    x = torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rows)).bfloat16()
    x[0, 5] = torch.nan
    got = layer(x)
    assert got[0].isnan().all() and got[1:].isfinite().all()


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 40, 513, 530])
@pytest.mark.parametrize(("form", "block"), [(PACKED, 64), (NARROW, 32)])
@torch.inference_mode()
def test_dense_weights_may_lie_in_blocks_of_either_width(
    form: int, block: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of steps with more rows than compiled products take at once."""
    monkeypatch.setattr(products, "ROWS_MAX", rows)
    draws = torch.Generator().manual_seed(5)
    weight = torch.randn(ROWS, COLUMNS, generator=draws).bfloat16()
    lying = weight.view(-1, block, COLUMNS // 2, 2).transpose(1, 2).contiguous()
    x = torch.randn(rows, COLUMNS, generator=draws).bfloat16()
    exact = x.double() @ weight.double().t()
    got = products.product(x, Linear(lying.data_ptr(), None, None, ROWS, COLUMNS, form, 0))
    assert (got.double() - exact).abs().amax() / exact.abs().amax() < 2**-8


@pytest.mark.skipif("amx_int8" not in Path("/proc/cpuinfo").read_text(), reason="without tiles many rows are rounded")
@pytest.mark.parametrize("columns", [64, 320, 2112])
@torch.inference_mode()
def test_of_eight_bits_it_does_not_depend_on_the_rows_beside(columns: int) -> None:
    """Sums of integers are exact, in whatever order."""
    layer, _ = _layer("int8", columns)
    x = torch.randn(530, columns, generator=torch.Generator().manual_seed(4)).bfloat16()
    alone = torch.cat([layer(row) for row in x.split(1)])
    for rows in (2, 3, 8, 9, 31, 257, 530):
        assert torch.equal(layer(x[:rows]), alone[:rows])


@torch.inference_mode()
def test_products_of_torch_in_between_are_as_ever() -> None:
    """Both set up the tiles of a thread, on processors that have them."""
    layer, _ = _layer("int8", COLUMNS)
    x = torch.randn(23, COLUMNS, generator=torch.Generator().manual_seed(1)).bfloat16()
    dense = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(2)).bfloat16()
    alone, own = torch.nn.functional.linear(x, dense), layer(x)
    for _ in range(3):
        assert torch.equal(torch.nn.functional.linear(x, dense), alone)
        assert torch.equal(layer(x), own)


@torch.inference_mode()
def test_float32_keeps_its_own_way() -> None:
    layer, weight = _layer("int8", COLUMNS)
    layer.bias = None
    x = torch.randn(3, COLUMNS, generator=torch.Generator().manual_seed(1))
    assert (layer(x) - x @ weight.t()).abs().amax() < 1e-3
    assert layer._compiled is not None and layer._compiled[1] is None
