"""Tiles against attention in float64, where oneDNN multiplies in bfloat16."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aegis.core.model import KvLayer, KvShape
from aegis.engine.paged_attention import Kind, Prefill
from aegis.engine.scratch import Scratch
from aegis.engine.tensor_views import KvViews
from aegis.engine.tiled_attention import FIRST_ROW, SAMPLED, TILE_ROWS, _has_products, attend_tiles, first_tiled
from tests.unit.engine.images import Arena

pytestmark = pytest.mark.skipif(not _has_products(), reason="oneDNN does not multiply in bfloat16 on this processor")

ROUNDING = 2.0**-8
"""Of one number in bfloat16, relative."""


def definition(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, start: int, window: int | None, scaling: float
) -> torch.Tensor:
    """`[tokens, query_heads, value_dim]`, in float64, of keys and values from position 0 on."""
    _, query_heads, tokens, _ = query.shape
    group = query_heads // key.shape[1]
    keys, values = (part[0].double().repeat_interleave(group, 0) for part in (key, value))
    scores = query[0].double() @ keys.transpose(1, 2) * scaling
    at = torch.arange(start, start + tokens)[:, None]
    seen = torch.arange(key.shape[2])[None]
    hidden = (seen > at) if window is None else (seen > at) | (seen <= at - window)
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), 2).matmul(values).transpose(0, 1)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


def error(result: torch.Tensor, expected: torch.Tensor, terms: torch.Tensor | None = None) -> float:
    """Relative to what was expected, or to the sum of the absolute `terms`, for large ones may cancel."""
    return float((result.double() - expected).norm() / (expected if terms is None else terms).norm())


@settings(max_examples=40)
@given(
    tokens=st.integers(1, 700),
    start=st.integers(FIRST_ROW, 900),
    window=st.sampled_from([None, TILE_ROWS + 2 * SAMPLED, 600, 1500]),
    group=st.integers(1, 4),
    scaling=st.sampled_from([None, 0.1]),
    dims=st.sampled_from([(16, 16), (16, 8)]),
)
def test_tiles_follow_the_definition(
    tokens: int, start: int, window: int | None, group: int, scaling: float | None, dims: tuple[int, int]
) -> None:
    """Keys that come after a row or lie before its window are large, so that one of them would change everything."""
    torch.manual_seed(tokens)
    query = drawn(1, 2 * group, tokens, dims[0])
    key, value = drawn(1, 2, start + tokens, dims[0]), drawn(1, 2, start + tokens, dims[1])
    value[:, :, ::7] *= 50
    first = 0 if window is None else max(start - window + 1, 0) // 16 * 16  # where a gather would begin
    mixed = attend_tiles(query, key[:, :, first:], value[:, :, first:], start, window, scaling, Scratch())
    expected = definition(query, key, value, start, window, scaling or dims[0] ** -0.5)
    terms = definition(query, key, value.abs(), start, window, scaling or dims[0] ** -0.5)
    assert error(mixed[0], expected, terms) < 0.5 * ROUNDING


def test_large_scores_are_not_rounded_where_they_decide() -> None:
    """The first position is looked at most, as in many heads: without a guess of the largest score the error is that
    of scores of 100, a quarter of a unit."""
    torch.manual_seed(0)
    query, key, value = drawn(1, 4, 64, 64), drawn(1, 2, 1024, 64), drawn(1, 2, 1024, 64)
    query[..., 0] = 28
    key[..., 0] = 28
    key[..., 1:] /= 4
    mixed = attend_tiles(query, key, value, 960, None, None, Scratch())
    assert error(mixed[0], definition(query, key, value, 960, None, 64**-0.5)) < 2 * ROUNDING
    spelled = torch.softmax((query[:, ::2] @ key.transpose(2, 3) / 8).masked_fill(_after(960, 64), -torch.inf), 3)
    assert error((spelled @ value).transpose(1, 2)[0], definition(query[:, ::2], key, value, 960, None, 0.125)) > 0.03


def _after(start: int, tokens: int) -> torch.Tensor:
    return torch.arange(start + tokens)[None] > torch.arange(start, start + tokens)[:, None]


@pytest.mark.parametrize("window", [None, 700])
def test_a_prompt_in_pieces_over_blocks_is_attended_as_the_whole(window: int | None) -> None:
    torch.manual_seed(1)
    layer = KvLayer(2, 16, 16)
    shape = KvShape((layer,), "bfloat16", 2)
    arena = Arena(slab_bytes=7 * shape.block_bytes, slabs=20, seed=3)
    blocks = arena.take(shape, 2000)
    query, key, value = drawn(1, 6, 2000, 16), drawn(1, 2, 2000, 16), drawn(1, 2, 2000, 16)
    expected = definition(query, key, value, 0, window, 0.25)
    scratch = Scratch()
    for start, stop in ((0, 900), (900, 904), (904, 1500), (1500, 2000)):
        new = (query[:, :, start:stop], key[:, :, start:stop], value[:, :, start:stop])
        piece = Prefill(KvViews(arena.region, shape), scratch, start, stop, blocks)
        mixed = piece.attend(0, *new, Kind(None, window, None, None))
        assert error(mixed[0], expected[start:stop]) < 1.5 * ROUNDING


def test_tiles_are_for_many_scores_in_bfloat16() -> None:
    query = drawn(1, 4, 512, 16)
    assert first_tiled(query, 2, 0, 512, None) == FIRST_ROW
    assert first_tiled(query, 2, 4000, 4512, None) == 4000
    assert first_tiled(query[:, :, :4], 2, 300, 304, None) == 304  # few
    assert first_tiled(query.float(), 2, 4000, 4512, None) == 4512
    assert first_tiled(query, 2, 4000, 4512, TILE_ROWS) == 4512  # a tile would have nothing that all its rows see
