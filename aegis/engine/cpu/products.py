"""Products of quantised layers by the compiled code, for steps that run through a model's modules: prompts, and models
of other kinds than Llama's. In bfloat16: float32 has ways of its own, whose sums are as wide as its numbers."""

from __future__ import annotations

from threading import local

import torch

from aegis.engine.cpu.library import BLOCK, COLUMNS_MAX, INT4, Linear, knows, library
from aegis.engine.packed_linear import bytes_of

ROWS_MAX = 512
"""More are multiplied piece by piece, through scratch memory of that many."""

_held = local()


def linear_of(
    form: int, integers: torch.Tensor, scales: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype
) -> Linear | None:
    """None: the compiled code is not here, or does not take it."""
    rows, columns = shape
    whole = rows % BLOCK == 0 and columns % BLOCK == 0 and columns <= COLUMNS_MAX
    if library() is None or dtype != torch.bfloat16 or not whole or not knows(form, dtype):
        return None
    group = columns // scales.shape[0] if form == INT4 else 0
    address = (bytes_of(integers) if integers.is_mkldnn else integers).data_ptr()
    return Linear(address, None, scales.data_ptr(), rows, columns, form, group)


def product(x: torch.Tensor, linear: Linear) -> torch.Tensor:
    """The product of `x [rows, columns]` with the weight."""
    found, rows = library(), len(x)
    assert found is not None
    x, out = x.contiguous(), torch.empty(rows, linear.rows, dtype=x.dtype)
    scratch = _scratch(found.aegis_product_bytes(linear, min(rows, ROWS_MAX)))
    threads, width = torch.get_num_threads(), x.dtype.itemsize
    for start in range(0, rows, ROWS_MAX):
        source = x.data_ptr() + start * linear.columns * width
        target = out.data_ptr() + start * linear.rows * width
        found.aegis_product(linear, source, target, min(rows - start, ROWS_MAX), scratch, threads)
    return out


def _scratch(nbytes: int) -> int:
    """Memory of the calling thread."""
    memory = getattr(_held, "memory", None)
    if memory is None or len(memory) < nbytes:
        memory = _held.memory = torch.empty(nbytes, dtype=torch.uint8)
    address: int = memory.data_ptr()
    return address
