from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.ids import RequestId
from aegis.core.model import KvLayer, KvShape
from aegis.engine.block_table import block_table
from aegis.engine.gpu.decode_inputs import BUCKETS, DecodeInputs, bucket_of
from aegis.engine.protocol import StepRow
from aegis.engine.tensor_views import KvViews
from tests.unit.engine.images import Arena

SHAPE = KvShape((KvLayer(1, 4, 4),), "float32", 4)


@given(st.integers(1, BUCKETS[-1]))
def test_a_bucket_is_the_next_one_that_holds_the_rows(rows: int) -> None:
    assert bucket_of(rows) == min(bucket for bucket in BUCKETS if bucket >= rows)


@given(st.lists(st.tuples(st.integers(0, 198), st.integers(0, 90)), min_size=1, max_size=11))
def test_each_step_finds_its_own_rows_and_padding_that_does_nothing(rows: list[tuple[int, int]]) -> None:
    arena = Arena()
    views = KvViews(arena.region, SHAPE)
    inputs = DecodeInputs(torch.device("cpu"), blocks=200)
    own = [arena.take(SHAPE, position + 40) for _, position in rows]  # more than is written so far
    for some in (rows, rows[:3], rows):  # three leave a fourth as padding where another row was
        batch = [
            StepRow(RequestId(i), (token,), position, blocks)
            for i, ((token, position), blocks) in enumerate(zip(some, own, strict=False))
        ]
        bucket = inputs.load(batch, views)
        tables = inputs.tables(bucket)
        padding = [0] * (bucket - len(some))
        assert inputs.tokens(bucket)[:, 0].tolist() == [token for token, _ in some] + padding
        assert inputs.positions(bucket)[:, 0].tolist() == [position for _, position in some] + padding
        assert tables.lengths.tolist() == [position + 1 for _, position in some] + padding
        for row, start in zip(batch, tables.starts.tolist(), strict=False):
            needed = row.start // 16 + 1
            assert tables.units[start : start + needed].tolist() == views.units(row.blocks[:needed]).tolist()


def test_a_block_is_finite_from_its_first_position_on() -> None:
    arena = Arena()
    ctypes.memset(arena.region.base, 0xFF, arena.region.nbytes)
    views, inputs = KvViews(arena.region, SHAPE), DecodeInputs(torch.device("cpu"), blocks=9)
    begun, going_on = block_table([(0, 2)]), block_table([(2, 4)])
    inputs.load([StepRow(RequestId(0), (1,), 16, begun), StepRow(RequestId(1), (1,), 17, going_on)], views)
    finite = [bool(views.blocks[int(unit)].isfinite().all()) for unit in views.units(np.concatenate([begun, going_on]))]
    assert finite == [False, True, False, False]


def test_nothing_is_sent_that_the_step_would_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step waits for the GPU once, for its tokens, also where a block begins."""
    arena = Arena()
    views, inputs = KvViews(arena.region, SHAPE), DecodeInputs(torch.device("cpu"), blocks=9)
    to, waits = torch.Tensor.to, list[bool]()

    def sent(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:
        waits.append(not non_blocking)
        return to(tensor, device)

    monkeypatch.setattr(torch.Tensor, "to", sent)
    inputs.load([StepRow(RequestId(0), (1,), 16, block_table([(0, 2)]))], views)
    assert waits == [False]


def test_addresses_stay() -> None:
    views, inputs = KvViews(Arena().region, SHAPE), DecodeInputs(torch.device("cpu"), blocks=9)
    before = [part.data_ptr() for part in vars_of(inputs)]
    inputs.load([StepRow(RequestId(0), (1,), 20, block_table([(3, 5)]))], views)
    assert [part.data_ptr() for part in vars_of(inputs)] == before


def vars_of(inputs: DecodeInputs) -> list[torch.Tensor]:
    tables = inputs.tables(2)
    return [tables.lengths, tables.starts, tables.units]


@pytest.mark.parametrize(("positions", "parts"), [([0] * 256, [256]), ([0] * 257, [256, 1]), ([63, 63, 0], [2, 1])])
def test_steps_are_cut_where_they_do_not_fit(positions: list[int], parts: list[int]) -> None:
    inputs = DecodeInputs(torch.device("cpu"), blocks=8 if len(positions) == 3 else 999)
    rows = [StepRow(RequestId(i), (0,), position, block_table([(0, 1)])) for i, position in enumerate(positions)]
    assert [len(part) for part in inputs.parts(rows, 16)] == parts
