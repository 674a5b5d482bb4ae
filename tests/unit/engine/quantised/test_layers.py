"""Layers over quantised weights multiply by what their integers stand for, however many rows there are."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from aegis.core.errors import ModelRefused
from aegis.core.model import TensorEntry, WeightsName
from aegis.engine.packed_linear import packed_at
from aegis.engine.quantised import blocks, digits, layers
from aegis.engine.quantised.integers import Integers, dequantised, quantise
from aegis.engine.quantised.layers import FORMS, QuantisedLinear, parts, replace_layers

ROWS = (1, 3, 40, 100, 300)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.004, torch.float16: 6e-4}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small weights are several of them."""
    monkeypatch.setattr(layers, "_TILE_ELEMENTS", 1 << 14)
    monkeypatch.setattr(layers, "_TILE_ROWS", 32)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer_of(
    integers: Integers, dtype: torch.dtype, *, packs: bool, bias: torch.Tensor | None = None
) -> QuantisedLinear:
    """Bound to memory of its own, `held`."""
    rows, columns = integers.shape
    plain = torch.nn.Linear(columns, rows, bias=False)
    plain.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
    found = parts(integers, dtype, packs=packs)
    layer = FORMS[found[0].name](plain)
    layer.held = [part.content.clone() for part in found]  # type: ignore[assignment]
    for part, held in zip(found, layer.held, strict=True):
        at = packed_at(held.data_ptr(), part.shape, part.dtype, part.packing) if part.packing else held
        layer._buffers[part.name] = at
    return layer


def off(layer: QuantisedLinear, integers: Integers, dtype: torch.dtype, rows: int) -> float:
    """The layer's error over the size of the product, which is float64's."""
    x = drawn(rows, rows, integers.shape[1]).to(dtype)
    with torch.inference_mode():
        found = layer(x).double()
    wanted = linear(x.double(), dequantised(integers).double())
    assert found.shape == wanted.shape
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("shape", [(320, 192), (64, 64), (176, 176), (48, 128)])
@pytest.mark.parametrize("weights", ["int8", "int4", "int4-g32"])
def test_products_are_those_of_what_the_integers_stand_for(
    weights: WeightsName, shape: tuple[int, int], packs: bool, dtype: torch.dtype
) -> None:
    integers = quantise(drawn(7, *shape).to(dtype), weights)
    assert integers is not None
    layer = layer_of(integers, dtype, packs=packs)
    assert max(off(layer, integers, dtype, rows) for rows in ROWS) < TOLERANCE[dtype]


def test_each_form_is_used_where_it_belongs() -> None:
    eight, four = quantise(drawn(7, 64, 128), "int8"), quantise(drawn(7, 64, 128), "int4")
    assert eight and four
    packed = [type(layer_of(each, torch.float32, packs=True)) for each in (eight, four)]
    plain = [type(layer_of(each, torch.float32, packs=False)) for each in (eight, four)]
    assert packed == [layers.Int8Digits if digits.supported() else layers.Int8Rows, layers.Int4Blocks]
    assert plain == [layers.Int8Rows, layers.Int4Rows]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("packs", [True, False])
def test_foreign_integers_of_any_group_are_multiplied(bits: int, packs: bool) -> None:
    """Such as 8 bits in groups of 32, groups of 16, and shapes of which kernels would read too much."""
    for shape, groups in (((64, 128), 4), ((64, 128), 8), ((40, 64), 1), ((40, 24), 1), ((40, 24), 3), ((7, 6), 1)):
        least, most = (-127, 128) if bits == 8 else (0, 16)
        values = torch.randint(least, most, shape, generator=torch.Generator().manual_seed(3)).to(torch.int8)
        integers = Integers(bits, values, drawn(1, shape[0], groups).abs() + 0.1)  # type: ignore[arg-type]
        layer = layer_of(integers, torch.float32, packs=packs)
        assert max(off(layer, integers, torch.float32, rows) for rows in ROWS) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(320, 256), (48, 64), (64, 384)])
def test_bytes_in_groups_are_multiplied_as_halves(shape: tuple[int, int], dtype: torch.dtype) -> None:
    draws = torch.Generator().manual_seed(3)
    values = torch.randint(-128, 128, shape, generator=draws, dtype=torch.int16).to(torch.int8)
    for group in (size for size in (32, 64, 128) if shape[1] > size):
        scales = (drawn(1, shape[0], shape[1] // group).abs() + 0.1).to(dtype).float()
        integers, bias = Integers(8, values, scales), drawn(8, shape[0]).to(dtype)
        layer = layer_of(integers, dtype, packs=True)
        assert type(layer) is layers.Int8Halves
        assert max(off(layer, integers, dtype, rows) for rows in ROWS) < TOLERANCE[dtype]
        x = drawn(9, 40, shape[1]).to(dtype)
        found, plain = layer_of(integers, dtype, packs=True, bias=bias * 1000)(x), layer(x)
        torch.testing.assert_close(found, plain + bias * 1000)


def test_scales_of_bytes_that_halves_cannot_hold_stay_in_rows() -> None:
    integers = Integers(8, torch.ones(64, 128, dtype=torch.int8), torch.full((64, 2), 5000.0))
    assert type(layer_of(integers, torch.float16, packs=True)) is layers.Int8Rows
    assert type(layer_of(integers, torch.float32, packs=True)) is layers.Int8Halves


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_bias_is_added_and_leading_dimensions_stay(weights: WeightsName, packs: bool) -> None:
    integers, bias = quantise(drawn(7, 64, 128), weights), drawn(8, 64)
    assert integers
    layer = layer_of(integers, torch.float32, packs=packs, bias=bias)
    for rows in (1, 200):
        x = drawn(9, 2, rows, 128)
        torch.testing.assert_close(layer(x), linear(x, dequantised(integers), bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_bytes_may_change_beneath_a_layer(weights: WeightsName, packs: bool) -> None:
    first, second = (quantise(drawn(seed, 64, 128), weights) for seed in (1, 2))
    assert first and second
    layer = layer_of(first, torch.float32, packs=packs)
    for integers in (second, first):
        for held, part in zip(layer.held, parts(integers, torch.float32, packs=packs), strict=True):
            held.copy_(part.content)
        assert off(layer, integers, torch.float32, 300) < TOLERANCE[torch.float32]
        assert off(layer, integers, torch.float32, 1) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_orders_that_are_not_known_are_left_to_the_kernels(
    weights: WeightsName, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "halves_are_known", lambda: False)
    monkeypatch.setattr(layers, "bytes_are_known", lambda: False)
    monkeypatch.setattr(layers, "of_halves", None)
    monkeypatch.setattr(layers, "of_bytes", None)
    integers = quantise(drawn(7, 128, 128), weights)
    assert integers
    layer = layer_of(integers, torch.float32, packs=True)
    assert off(layer, integers, torch.float32, 300) < TOLERANCE[torch.float32]


def test_orders_are_known_where_there_is_avx_512() -> None:
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("this processor has other orders")
    assert blocks.halves_are_known()
    assert blocks.bytes_are_known() or not digits.supported()


def test_an_order_that_is_another_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    if not blocks.halves_are_known():
        pytest.skip("this processor has another order")
    monkeypatch.setattr(blocks, "_HALF", 16)
    assert not blocks.halves_are_known.__wrapped__()


def test_large_values_do_not_spoil_other_rows_and_zeros_stay_zeros() -> None:
    if not digits.supported():
        pytest.skip("this processor multiplies no bytes")
    integers = quantise(drawn(7, 64, 128), "int8")
    assert integers
    layer = layer_of(integers, torch.bfloat16, packs=True)
    x = drawn(1, 3, 128).bfloat16()
    alone = layer(x[:1])
    x[1] *= 1e4
    x[2] = 0
    found = layer(x)
    torch.testing.assert_close(found[:1], alone)
    assert not found[2].any()


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_no_rows_make_none(weights: WeightsName, packs: bool) -> None:
    integers = quantise(drawn(7, 64, 128), weights)
    assert integers
    assert layer_of(integers, torch.float32, packs=packs)(torch.empty(1, 0, 128)).shape == (1, 0, 64)


def test_an_input_is_split_once_for_layers_that_share_it() -> None:
    x = drawn(1, 2, 128)
    first = digits.digits_once(x)
    assert digits.digits_once(x) is first
    assert digits.digits_once(x.clone()) is not first


def test_integers_of_what_is_no_linear_layer_are_refused() -> None:
    entry = TensorEntry(("0.int8_rows",), "int8", (4, 4), 0, 16, True)
    with pytest.raises(ModelRefused, match="0 is quantised and no linear layer"):
        replace_layers(torch.nn.Sequential(torch.nn.Embedding(4, 4)), [entry])
