"""The decode kernels against the definition, on CPU tensors. Triton's interpreter has to be chosen before Triton is
imported: `test_triton_attention` runs this file in a process of its own."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from aegis.core.ids import PageRun
from aegis.core.model import KvLayer
from aegis.device.cpu.device import CpuDevice
from aegis.device.cpu.pool import CpuPool
from aegis.device.shared_events import SharedWords
from aegis.engine.gpu import triton_kernels
from aegis.engine.gpu.triton_attention import splits_for
from aegis.engine.paged_attention import Kind
from tests.long_forms import first_rows_of
from tests.unit.engine.gpu.decode_attention import DTYPES, check, check_in_second_slab, second_slab_alone

assert os.environ["TRITON_INTERPRET"] == "1"


def _dot(self: Any, a: Any, b: Any, d: Any, *_: object) -> TensorHandle:
    """The interpreter keeps bfloat16 as 16-bit integers, and multiplies those."""

    def numbers(x: Any) -> Any:
        return (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype.scalar == tl.bfloat16 else x.data

    return TensorHandle(np.matmul(numbers(a), numbers(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)


InterpreterBuilder.create_dot = _dot

layers = st.sampled_from([KvLayer(2, 8, 4), KvLayer(1, 24, 24), KvLayer(3, 16, 16), KvLayer(1, 40, 16)])
lengths = st.lists(st.integers(0, 100), min_size=1, max_size=3).filter(any)


@settings(deadline=None, max_examples=8)
@given(
    layers,
    st.sampled_from([1, 3, 4]),
    lengths,
    st.sampled_from([None, 0.3]),
    st.sampled_from([None, 1, 5, 17, 70]),
    st.sampled_from([None, 2.0]),
    st.booleans(),
    st.sampled_from(sorted(DTYPES)),
    st.sampled_from([1, 2, 8]),
    st.integers(0, 99),
)
def test_attends_by_the_definition(
    layer: KvLayer,
    group: int,
    rows: list[int],
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    dtype: str,
    splits: int,
    seed: int,
) -> None:
    logits = torch.linspace(-1, 3, layer.heads * group) if sinks else None
    check(layer, group, rows, Kind(scaling, window, softcap, logits), dtype, splits, seed)


@pytest.mark.parametrize(("dtype", "splits"), first_rows_of(1, [("bfloat16", 4), ("float32", 1)]))
def test_the_shape_of_an_8b_model(dtype: str, splits: int) -> None:
    check(KvLayer(2, 128, 128), 2, [130, 0, 64], Kind(None, None, None, None), dtype, splits, 0)


@pytest.mark.long
def test_blocks_of_other_sizes() -> None:
    for block_tokens in (1, 8, 32):
        kind = Kind(None, 50, None, None)
        check(KvLayer(1, 16, 16), 2, [90, 33], kind, "float32", 2, 1, block_tokens=block_tokens)


class Strict:
    """Launches a kernel as Triton does on a GPU: not with pointers to what is not mapped."""

    def __init__(self, kernel: Any, unmapped: range) -> None:
        self._kernel = kernel
        self._unmapped = unmapped

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **named: Any) -> None:
            for argument in arguments:
                refused = isinstance(argument, torch.Tensor) and argument.data_ptr() in self._unmapped
                assert not refused, "Pointer argument cannot be accessed from Triton (cpu tensor?)"
            self._kernel[grid](*arguments, **named)

        return launch


def test_attends_while_nothing_is_mapped_where_caches_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, words = CpuPool(2 << 20), SharedWords.create(1)
    device = CpuDevice(pool.address, words)
    device.grant([PageRun(0, 1)])
    space = second_slab_alone(device)
    for name in ("append", "attend_part", "combine"):
        unmapped = range(space.base, space.base + device.page_bytes)
        monkeypatch.setattr(triton_kernels, name, Strict(getattr(triton_kernels, name), unmapped))
    check_in_second_slab(device, space)
    device.close()
    pool.close()
    words.close()


def test_parts_fill_the_processors() -> None:
    assert splits_for(1, 8, 132) == 64
    assert splits_for(8, 8, 132) == 8
    assert splits_for(256, 8, 132) == 1
    assert splits_for(1, 1, 10_000) == 64
