from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.model import KvLayer, KvShape
from aegis.engine.block_table import block_table
from aegis.engine.protocol import KvRegion
from aegis.engine.tensor_views import KvViews, dtype_named, tensor_at

layers = st.builds(KvLayer, st.integers(1, 3), st.integers(1, 5), st.integers(1, 5))
shapes = st.builds(
    KvShape,
    st.lists(layers, min_size=1, max_size=3).map(tuple),
    st.just("float32"),
    st.just(4),
    st.sampled_from([2, 4, 16]),
)


@given(shapes, st.integers(1, 3), st.integers(0, 40), st.integers(1, 3))
def test_views_show_the_layout_that_the_contract_states(shape: KvShape, per_slab: int, tail: int, slabs: int) -> None:
    slab_bytes = per_slab * shape.block_bytes + 4 * min(tail, shape.block_bytes // 4 - 1)
    memory = torch.arange(slabs * slab_bytes // 4, dtype=torch.float32)
    views = KvViews(KvRegion(memory.data_ptr(), slabs * slab_bytes, slab_bytes), shape)
    size = shape.block_tokens
    for block in range(slabs * per_slab):
        unit = int(views.units(block_table([(block, block + 1)]))[0])
        at = (block // per_slab * slab_bytes + block % per_slab * shape.block_bytes) // 4
        assert float(views.blocks[unit, 0]) == at
        for layer, view in zip(shape.layers, views.layers, strict=True):
            for part, dim in ((view.keys, layer.key_dim), (view.values, layer.value_dim)):
                count = size * layer.heads * dim
                assert part[unit].flatten().tolist() == list(range(at, at + count))
                at += count


@given(shapes)
def test_layers_of_one_geometry_are_told_by_their_number(shape: KvShape) -> None:
    memory = torch.zeros(shape.block_bytes // 4)
    views = KvViews(KvRegion(memory.data_ptr(), shape.block_bytes, shape.block_bytes), shape)
    for a, first in zip(shape.layers, views.layers, strict=True):
        for b, second in zip(shape.layers, views.layers, strict=True):
            assert (a == b) == (first.geometry == second.geometry)


def test_a_tensor_is_the_memory_at_its_address() -> None:
    memory = torch.zeros(6)
    view = tensor_at(memory.data_ptr() + 8, (2, 2), torch.float32)
    memory += torch.arange(6)
    assert view.tolist() == [[2, 3], [4, 5]]
    view[1, 1] = 9
    assert memory[5] == 9


def test_an_empty_tensor_needs_no_address() -> None:
    assert tensor_at(0, (0, 4), dtype_named("bfloat16")).shape == (0, 4)
