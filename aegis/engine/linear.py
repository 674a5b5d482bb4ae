"""Float32 linear layers through oneDNN.

torch hands float32 products on the CPU to MKL, whose kernels for small batches are 1.3 to 2.3 times slower than
oneDNN's on processors that are not Intel's and no faster on those. The operator reads the weight where it lies; only
layers too small to pay for its call overhead stay as they are. Other dtypes reach oneDNN by themselves.
"""

from __future__ import annotations

from functools import partial

import torch

SMALLEST_WEIGHT_ELEMENTS = 1 << 16


def use_onednn(module: torch.nn.Module) -> None:
    """Replaces the `forward` of every plain linear layer. Weights must be bound: what is bound now stays."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # torch was built without oneDNN
        return
    operator = torch.ops.mkldnn._linear_pointwise.default
    for layer in module.modules():
        if type(layer) is not torch.nn.Linear or not _suitable(layer.weight):
            continue
        layer.forward = partial(  # type: ignore[method-assign]
            operator, W=layer.weight, B=layer.bias, attr="none", scalars=[], algorithm=""
        )


def _suitable(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= SMALLEST_WEIGHT_ELEMENTS
