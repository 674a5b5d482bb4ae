"""The decode kernels on a GPU, against the definition."""

from __future__ import annotations

import pytest
import torch

from aegis.core.model import KvLayer
from aegis.device.cuda.device import CudaDevice
from aegis.engine.paged_attention import Kind
from tests.unit.engine.gpu.decode_attention import DTYPES, check, check_in_second_slab, second_slab_alone

LAYERS = [KvLayer(8, 128, 128), KvLayer(2, 64, 64), KvLayer(1, 256, 256), KvLayer(4, 192, 128), KvLayer(3, 24, 24)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 100])
def test_attends_by_the_definition(layer: KvLayer, dtype: str, window: int | None) -> None:
    for group in (1, 4, 7):
        heads = layer.heads * group
        sinks = torch.linspace(-1, 3, heads, device="cuda")
        for kind in (Kind(None, window, None, None), Kind(0.2, window, 5.0, None), Kind(None, window, None, sinks)):
            for splits in (1, 8, 64):
                check(layer, group, [700, 1, 0, 16, 33], kind, dtype, splits, device="cuda")


def test_attends_while_nothing_is_mapped_where_caches_begin(device: CudaDevice) -> None:
    check_in_second_slab(device, second_slab_alone(device))
