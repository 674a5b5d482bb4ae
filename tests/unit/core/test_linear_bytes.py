"""What is counted of packed weights is what is stored of them."""

from __future__ import annotations

import pytest
import torch

from aegis.core.model import WeightsName, linear_bytes
from aegis.engine.quantised.integers import quantise
from aegis.engine.quantised.layers import parts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(64, 256), (128, 192), (32, 96), (48, 80), (30, 64)])
@pytest.mark.parametrize("weights", ["int8", "int4", "int4-g64", "int4-g32"])
def test_a_layer_has_the_bytes_that_are_counted(
    weights: WeightsName, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    integers = quantise(weight, weights)
    stored = parts(integers, dtype, packs=False) if integers else [weight]
    nbytes = sum(part.content.nbytes if integers else part.nbytes for part in stored)  # type: ignore[union-attr]
    assert nbytes == linear_bytes(weights, *shape, dtype.itemsize)
