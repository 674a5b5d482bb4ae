"""Decode attention over paged KV in Triton. Not run on a GPU: compiled for several, tested under Triton's interpreter.

One query per sequence attends to blocks scattered over the KV region. A sequence is cut into `splits` parts that run
side by side (flash-decoding, Dao et al., 2023), or a batch of one would leave most of the GPU idle; a second kernel
puts the parts together. All query heads of a KV head share one program, so that keys and values are read once.

Everything that changes from step to step is read from device memory, lengths included: the launches of a step are the
same at every step, and a CUDA graph can hold them. A row of length 0 reads and writes nothing.

Triton has the driver look at every pointer that it is given, and refuses one that leads nowhere. A layer's cache begins
in the first slab, which is mapped only while something is in it, so kernels are told where it is as a number.
"""

from __future__ import annotations

from subprocess import SubprocessError
from typing import Any

import torch
import triton
import triton.language as tl

from aegis.core.errors import UserError
from aegis.engine.gpu import triton_kernels as kernels
from aegis.engine.gpu.decode_inputs import Tables
from aegis.engine.paged_attention import Kind
from aegis.engine.tensor_views import LayerViews

PROGRAMS_PER_SM = 2
SPLITS_MAX = 64
_LOG2_E = 1.4426950408889634


def check_launches() -> None:
    """Has Triton make what it launches kernels with, or find it in its cache. It is C: where that cannot be compiled,
    each step would fail. Raises UserError."""
    try:
        triton.runtime.driver.active.get_current_device()
    except (OSError, RuntimeError, SubprocessError) as error:
        raise UserError(
            f"Triton cannot launch kernels here: {error} (it needs a C compiler, and the headers of this Python)",
            param="device",
        ) from error


def splits_for(rows: int, heads: int, processors: int) -> int:
    """Parts per sequence, a power of two, such that `rows * heads * splits` programs fill so many processors."""
    wanted = -(-PROGRAMS_PER_SM * processors // (rows * heads))
    return min(1 << (wanted - 1).bit_length(), SPLITS_MAX)


def append(cache: LayerViews, tables: Tables, key: torch.Tensor, value: torch.Tensor) -> None:
    """Writes each row's new position. `key [rows, heads * key_dim]`, `value [rows, heads * value_dim]`."""
    _, size, key_width = cache.keys.shape
    value_width = cache.values.shape[2]
    kernels.append[(key.shape[0],)](
        *(key, value, cache.keys.data_ptr(), cache.values.data_ptr()),
        *(tables.lengths, tables.starts, tables.units),
        *(key.stride(0), value.stride(0), cache.keys.stride(0)),
        **_places(cache),
        SIZE=size,
        KEY_WIDTH=key_width,
        VALUE_WIDTH=value_width,
        TILE=triton.next_power_of_2(max(key_width, value_width)),
    )


def attend(cache: LayerViews, tables: Tables, query: torch.Tensor, kind: Kind, splits: int) -> torch.Tensor:
    """`query [rows, query_heads, key_dim]`, any strides but 1 in the last dimension; returns `[rows, query_heads,
    value_dim]`."""
    rows, query_heads, key_dim = query.shape
    assert query.stride(2) == 1 and key_dim == cache.key_dim
    group = query_heads // cache.heads
    size, dim = cache.keys.shape[1], cache.value_dim
    partial = torch.empty((rows, query_heads, splits, dim), dtype=torch.float32, device=query.device)
    weight = torch.empty((rows, query_heads, splits, 2), dtype=torch.float32, device=query.device)
    wide = max(triton.next_power_of_2(max(key_dim, dim)), 16)
    kernels.attend_part[(rows, cache.heads, splits)](
        *(query, cache.keys.data_ptr(), cache.values.data_ptr(), partial, weight),
        *(tables.lengths, tables.starts, tables.units),
        *(query.stride(0), query.stride(1), cache.keys.stride(0)),
        (kind.scaling or key_dim**-0.5) * (1.0 if kind.softcap else _LOG2_E),
        kind.softcap or 0.0,
        kind.window or 0,
        **_places(cache),
        SIZE=size,
        HEADS=cache.heads,
        GROUP=group,
        KEY_DIM=key_dim,
        VALUE_DIM=dim,
        SPLITS=splits,
        HAS_SOFTCAP=kind.softcap is not None,
        ROWS=max(triton.next_power_of_2(group), 16),  # the least that a matrix product takes
        POSITIONS=64 if wide <= 128 else 32,
        KEY_TILE=max(triton.next_power_of_2(key_dim), 16),
        VALUE_TILE=max(triton.next_power_of_2(dim), 16),
        num_warps=4 if group <= 32 else 8,
        num_stages=2,
    )
    mixed = torch.empty((rows, query_heads, dim), dtype=query.dtype, device=query.device)
    kernels.combine[(rows, query_heads)](
        *(partial, weight, mixed if kind.sinks is None else kind.sinks, mixed),
        QUERY_HEADS=query_heads,
        VALUE_DIM=dim,
        SPLITS=splits,
        HAS_SINKS=kind.sinks is not None,
        VALUE_TILE=max(triton.next_power_of_2(dim), 16),
    )
    return mixed


def _places(cache: LayerViews) -> dict[str, Any]:
    """What kernels know of the numbers that say where the cache is: the type of what is there, and whether several can
    be read at once."""
    aligned = (cache.keys.data_ptr() | cache.values.data_ptr()) % 16 == 0
    return {"TYPE": getattr(tl, str(cache.keys.dtype).removeprefix("torch.")), "ALIGNED": aligned}
