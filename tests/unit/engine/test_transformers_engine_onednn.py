from __future__ import annotations

import pytest
import torch

from aegis.engine.modules import MIDDLING_WEIGHT_ELEMENTS, SMALL_WEIGHT_ELEMENTS, use_onednn

MIDDLING, LARGE = 300, 800


def test_the_sizes_used_here_are_middling_and_large() -> None:
    assert SMALL_WEIGHT_ELEMENTS <= MIDDLING**2 < MIDDLING_WEIGHT_ELEMENTS <= LARGE**2


@pytest.mark.parametrize("width", [MIDDLING, LARGE])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_computes_what_torch_computes(width: int, bias: bool) -> None:
    layer = torch.nn.Linear(width, width, bias=bias)
    inputs = [torch.randn(*shape, width) for shape in ((1, 1), (8, 1), (1, 40), (3,), (1, 90))]
    expected = [layer(x) for x in inputs]
    use_onednn(torch.nn.Sequential(layer))
    for x, y in zip(inputs, expected, strict=True):
        torch.testing.assert_close(layer(x), y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [MIDDLING, LARGE])
@torch.inference_mode()
def test_reads_the_weight_where_it_lies(width: int) -> None:
    layer = torch.nn.Linear(width, width, bias=False)
    use_onednn(torch.nn.Sequential(layer))
    for rows in (1, 2):
        x = torch.randn(rows, width)
        for scale in (1, 3):
            layer.weight.copy_(torch.eye(width) * scale)
            torch.testing.assert_close(layer(x), x * scale)


def test_leaves_alone_what_gains_nothing() -> None:
    class Special(torch.nn.Linear):
        pass

    kept = [torch.nn.Linear(8, 8), torch.nn.Linear(LARGE, LARGE, dtype=torch.bfloat16), Special(LARGE, LARGE)]
    use_onednn(torch.nn.Sequential(*kept))
    assert all("forward" not in vars(layer) for layer in kept)
