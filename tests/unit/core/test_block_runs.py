"""Runs of blocks against the same blocks one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.block_runs import (
    block_ids,
    blocks_after,
    count_blocks,
    count_within,
    cut_off,
    first_blocks,
    moved,
    paired,
    runs_of,
)

places = st.lists(st.integers(0, 40), unique=True)


@given(places)
def test_runs_are_the_blocks_in_their_order(blocks: list[int]) -> None:
    runs = runs_of(blocks)
    assert list(block_ids(runs)) == blocks and count_blocks(runs) == len(blocks)
    assert all(stop != start for (_, stop), (start, _) in pairwise(runs)), "they could be one"


@given(places, st.integers(0, 40), st.integers(0, 40))
def test_those_that_lie_within_bounds(blocks: list[int], start: int, stop: int) -> None:
    assert count_within(runs_of(blocks), (start, stop)) == sum(start <= block < stop for block in blocks)


@given(places, st.data())
def test_the_first_ones(blocks: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, len(blocks)))
    assert list(block_ids(first_blocks(runs_of(blocks), count))) == blocks[:count]
    assert list(block_ids(blocks_after(runs_of(blocks), count))) == blocks[count:]
    with pytest.raises(AssertionError, match="too few"):
        first_blocks(runs_of(blocks), len(blocks) + 1)


@given(places, st.data())
def test_the_last_ones_are_cut_off(blocks: list[int], data: st.DataObject) -> None:
    count, runs = data.draw(st.integers(0, len(blocks))), list(runs_of(blocks))
    kept = blocks[: len(blocks) - count]
    assert list(block_ids(cut_off(runs, count))) == blocks[len(kept) :]
    assert list(block_ids(runs)) == kept
    with pytest.raises(AssertionError, match="too few"):
        cut_off(runs, len(kept) + 1)


@given(places, places)
def test_each_block_is_paired_with_that_in_the_same_place(sources: list[int], targets: list[int]) -> None:
    count = min(len(sources), len(targets))
    copies = paired(runs_of(sources[:count]), runs_of(targets[:count]))
    pairs = [(source + at, target + at) for source, target, length in copies for at in range(length)]
    assert pairs == list(zip(sources, targets, strict=False))
    assert all((a + n, b + n) != (c, d) for (a, b, n), (c, d, _) in pairwise(copies)), "two copies could be one"


@pytest.mark.parametrize(("sources", "targets"), [(2, 1), (1, 2), (1, 0), (0, 1)])
def test_no_block_is_left_without_a_partner(sources: int, targets: int) -> None:
    with pytest.raises(AssertionError):
        paired(runs_of(range(sources)), runs_of(range(0, 2 * targets, 2)))


@given(places, places, st.data())
def test_where_blocks_are_after_copies(blocks: list[int], copied: list[int], data: st.DataObject) -> None:
    sources = sorted(copied)
    targets = data.draw(st.permutations(range(50, 50 + len(sources))))
    after = moved(runs_of(blocks), paired(runs_of(sources), runs_of(targets)))
    goes = dict(zip(sources, targets, strict=True))
    assert list(block_ids(after)) == [goes.get(block, block) for block in blocks]
    assert runs_of(block_ids(after)) == tuple(after), "what is adjacent is one run"
