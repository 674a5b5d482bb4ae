from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from aegis.engine.packed_linear import pack, packed_linear, packs, rounded_up

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25}


def _weight(seed: int, dtype: torch.dtype, shape: tuple[int, int] = (320, 192)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 3, 40, 65])
def test_bytes_may_change_beneath_a_layer(dtype: torch.dtype, rows: int) -> None:
    weights = [_weight(seed, dtype) for seed in (1, 2)]
    if not packs(weights[0]):
        pytest.skip("this processor packs no such weights")
    (description, first), (same, second) = map(pack, weights)
    assert description == same
    memory = torch.empty_like(first)
    layer = packed_linear(memory.data_ptr(), (320, 192), str(dtype).removeprefix("torch."), description)
    x, bias = _weight(3, dtype, (rows, 192)), _weight(4, dtype, (1, 320))[0]
    for content, weight in ((first, weights[0]), (second, weights[1]), (first, weights[0])):
        memory.copy_(content)
        torch.testing.assert_close(layer(x, weight), linear(x, weight), atol=TOLERANCE[dtype], rtol=0.01)
        torch.testing.assert_close(layer(x, weight, bias), linear(x, weight, bias), atol=TOLERANCE[dtype], rtol=0.01)


@pytest.mark.parametrize("shape", [(17, 192), (1, 70, 192), (3, 7, 192), (0, 192)])
def test_inputs_of_any_shape_are_multiplied(shape: tuple[int, ...]) -> None:
    weight = _weight(1, torch.float32)
    description, packed = pack(weight)
    layer = packed_linear(packed.data_ptr(), (320, 192), "float32", description)
    x, bias = _weight(2, torch.float32, shape), _weight(3, torch.float32, (1, 320))[0]
    found = layer(x, weight, bias)
    torch.testing.assert_close(found, linear(x, weight, bias), atol=1e-4, rtol=1e-4)
    assert found.is_contiguous()


def test_few_numbers_of_rows_are_multiplied() -> None:
    of_passes = {rounded_up(rows) for rows in range(1, 513)}
    assert len(of_passes) == 27
    assert all(rows <= rounded_up(rows) <= max(1.9 * rows, 16) for rows in range(1, 2000))


def test_what_is_no_matrix_of_floats_is_not_packed() -> None:
    assert not packs(torch.zeros(4, 4, 4))
    assert not packs(torch.zeros(4))
    assert not packs(torch.zeros(4, 4, dtype=torch.int8))


def test_a_description_that_is_none_is_refused() -> None:
    memory = torch.zeros(320 * 192)
    with pytest.raises(RuntimeError, match="refused"):
        packed_linear(memory.data_ptr(), (320, 192), "float32", b"")
