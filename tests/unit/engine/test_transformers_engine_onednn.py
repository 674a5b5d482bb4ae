from __future__ import annotations

import pytest
import torch

from aegis.engine.modules import ONEDNN_ELEMENTS_MIN, use_onednn

SMALL, LARGE = 300, 800


@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_computes_what_torch_computes(bias: bool) -> None:
    layer = torch.nn.Linear(LARGE, LARGE, bias=bias)
    inputs = [torch.randn(*shape, LARGE) for shape in ((1, 1), (8, 1), (1, 40), (3,), (1, 90))]
    expected = [layer(x) for x in inputs]
    use_onednn(torch.nn.Sequential(layer))
    for x, y in zip(inputs, expected, strict=True):
        torch.testing.assert_close(layer(x), y, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_reads_the_weight_where_it_lies() -> None:
    layer = torch.nn.Linear(LARGE, LARGE, bias=False)
    use_onednn(torch.nn.Sequential(layer))
    for rows in (1, 2):
        x = torch.randn(rows, LARGE)
        for scale in (1, 3):
            layer.weight.copy_(torch.eye(LARGE) * scale)
            torch.testing.assert_close(layer(x), x * scale)


def test_leaves_alone_what_gains_nothing() -> None:
    class Special(torch.nn.Linear):
        pass

    assert SMALL**2 < ONEDNN_ELEMENTS_MIN <= LARGE**2
    kept = [torch.nn.Linear(SMALL, SMALL), torch.nn.Linear(LARGE, LARGE, dtype=torch.bfloat16), Special(LARGE, LARGE)]
    use_onednn(torch.nn.Sequential(*kept))
    assert all("forward" not in vars(layer) for layer in kept)
