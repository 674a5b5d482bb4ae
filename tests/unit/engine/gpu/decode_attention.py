"""Checks the decode kernels against the definition, on any device."""

from __future__ import annotations

import numpy as np
import torch

from aegis.core.ids import PageRun
from aegis.core.model import KvLayer, KvShape
from aegis.device.protocol import Device, VirtualRange
from aegis.engine.gpu.decode_inputs import Tables
from aegis.engine.gpu.triton_attention import append, attend
from aegis.engine.paged_attention import Kind
from aegis.engine.protocol import KvRegion
from aegis.engine.tensor_views import KvViews, dtype_named
from tests.unit.engine.images import Arena

DTYPES = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}


def reference(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kind: Kind) -> torch.Tensor:
    """By the definition, in float64. `query [heads, key_dim]`, `keys [tokens, kv_heads, key_dim]`."""
    query, keys, values = query.double(), keys.double(), values.double()
    group = query.shape[0] // keys.shape[1]
    first = 0 if kind.window is None else max(0, keys.shape[0] - kind.window)
    out = []
    for head in range(query.shape[0]):
        key, value = keys[first:, head // group], values[first:, head // group]
        scores = key @ query[head] * (kind.scaling or query.shape[1] ** -0.5)
        if kind.softcap is not None:
            scores = torch.tanh(scores / kind.softcap) * kind.softcap
        if kind.sinks is not None:
            scores = torch.cat((scores, kind.sinks[head : head + 1].double()))
        out.append(scores.softmax(0)[: len(value)] @ value)
    return torch.stack(out)


def check(
    layer: KvLayer,
    group: int,
    rows: list[int],
    kind: Kind,
    dtype: str,
    splits: int,
    seed: int = 0,
    *,
    block_tokens: int = 16,
    device: str = "cpu",
) -> None:
    """Fills blocks position by position with `append`, over memory full of NaN, and attends from the last position.
    Rows of length 0 must leave everything as it is."""
    torch.manual_seed(seed)
    itemsize = dtype_named(dtype).itemsize
    shape = KvShape((KvLayer(1, 4, 4), layer), dtype, itemsize, block_tokens)
    arena = Arena(slab_bytes=3 * shape.block_bytes + 20, slabs=80, seed=seed, device=device)
    views = KvViews(arena.region, shape, torch.device(device))
    cache = views.layers[1]
    blocks = [views.units(arena.take(shape, max(length, 1)))[: -(-length // block_tokens)] for length in rows]
    starts = torch.tensor([sum(map(len, blocks[:i])) for i in range(len(rows))], dtype=torch.int32, device=device)
    units = torch.tensor([unit for own in blocks for unit in own], dtype=torch.int32, device=device)
    keys = torch.randn(len(rows), max(rows), layer.heads, layer.key_dim).to(device, views.dtype)
    values = torch.randn(len(rows), max(rows), layer.heads, layer.value_dim).to(device, views.dtype)
    before = max(rows) - block_tokens - 3
    for row, own in enumerate(blocks):  # what was there before the last few positions
        for at in range(min(rows[row], max(before, 0))):
            cache.keys[own[at // block_tokens], at % block_tokens] = keys[row, at].flatten()
            cache.values[own[at // block_tokens], at % block_tokens] = values[row, at].flatten()
    for at in range(max(before, 0), max(rows)):
        now = torch.tensor([at + 1 if at < length else 0 for length in rows], dtype=torch.int32, device=device)
        append(cache, Tables(now, starts, units), keys[:, at].flatten(1), values[:, at].flatten(1))
    tables = Tables(torch.tensor(rows, dtype=torch.int32, device=device), starts, units)
    query = torch.randn(len(rows), 3, layer.heads * group, layer.key_dim).to(device, views.dtype)[
        :, 1
    ]  # not contiguous
    mixed = attend(cache, tables, query, kind, splits)
    for row, length in enumerate(rows):
        if length == 0:
            assert not mixed[row].any()
            continue
        expected = reference(query[row], keys[row, :length], values[row, :length], kind)
        torch.testing.assert_close(mixed[row].double(), expected, rtol=DTYPES[dtype], atol=DTYPES[dtype])


def second_slab_alone(device: Device) -> VirtualRange:
    """Two slabs of a page each, of which the first is not mapped. Page 0 was granted."""
    space = device.reserve(2 * device.page_bytes)
    space.map(1, [PageRun(0, 1)])
    return space


def check_in_second_slab(device: Device, space: VirtualRange) -> None:
    """A first position attends to itself alone, in the second of the slabs."""
    shape, there = KvShape((KvLayer(2, 16, 16),), "float32", 4), torch.device(device.name)
    region = KvRegion(space.base, space.nbytes, device.page_bytes)
    views = KvViews(region, shape, there)
    unit = views.units(np.array([region.blocks_per_slab(shape)]))
    tables = Tables(*[torch.tensor(value, dtype=torch.int32, device=there) for value in ([1], [0], unit.tolist())])
    query, key, value = (torch.randn(1, heads * 16).to(there) for heads in (4, 2, 2))
    append(views.layers[0], tables, key, value)
    mixed = attend(views.layers[0], tables, query.view(1, 4, 16), Kind(None, None, None, None), 1)
    torch.testing.assert_close(mixed, value.view(1, 2, 16).repeat_interleave(2, 1))
