"""Float32 linear layers through oneDNN.

torch hands float32 products on the CPU to MKL, whose kernels for a few rows are 1.3 to 2.3 times slower than oneDNN's
on processors that are not Intel's. oneDNN's operator reads the weight where it lies, but costs some ten microseconds
more per call: small layers stay as they are, and middling ones where there is one row only. Other dtypes reach oneDNN
by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import linear

SMALL_WEIGHT_ELEMENTS = 1 << 16
MIDDLING_WEIGHT_ELEMENTS = 1 << 19

Forward = Callable[[torch.Tensor], torch.Tensor]


def use_onednn(module: torch.nn.Module) -> None:
    """Replaces the `forward` of every plain linear layer. Weights must be bound: what is bound now stays."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # torch was built without oneDNN
        return
    for layer in module.modules():
        if type(layer) is torch.nn.Linear and layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32:
            size = layer.weight.numel()
            if size >= MIDDLING_WEIGHT_ELEMENTS:
                layer.forward = _onednn(layer)  # type: ignore[method-assign, assignment]
            elif size >= SMALL_WEIGHT_ELEMENTS:
                layer.forward = _by_rows(layer)  # type: ignore[method-assign, assignment]


def _onednn(layer: torch.nn.Linear) -> Forward:
    operator = torch.ops.mkldnn._linear_pointwise.default
    return partial(operator, W=layer.weight, B=layer.bias, attr="none", scalars=[], algorithm="")


def _by_rows(layer: torch.nn.Linear) -> Forward:
    width, weight, bias, several = layer.weight.shape[1], layer.weight, layer.bias, _onednn(layer)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return linear(x, weight, bias) if x.numel() == width else several(x)

    return forward
