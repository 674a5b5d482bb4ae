"""KV blocks as runs: what holds a request's KV, what is copied and what is freed are a few of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from aegis.core.ids import BlockId, BlockRun

Blocks = tuple[BlockRun, ...]

BlockCopy = tuple[int, int, int]
"""The first block to copy from, the first one to copy to, and how many."""


def count_blocks(runs: Iterable[BlockRun]) -> int:
    count = 0
    for start, stop in runs:
        count += stop - start
    return count


def count_within(runs: Iterable[BlockRun], bounds: BlockRun) -> int:
    """The number of the blocks that lie in this range."""
    first, end = bounds
    return sum(min(stop, end) - max(start, first) for start, stop in runs if start < end and stop > first)


def block_ids(runs: Iterable[BlockRun]) -> Iterator[BlockId]:
    """One by one."""
    return (BlockId(block) for start, stop in runs for block in range(start, stop))


def runs_of(blocks: Iterable[int]) -> Blocks:
    """The blocks as runs, in the order given; those that are adjacent and ascend are one run."""
    runs: list[BlockRun] = []
    for block in blocks:
        append_run(runs, block, block + 1)
    return tuple(runs)


def append_run(runs: list[BlockRun], start: int, stop: int) -> None:
    """The last run goes on where it is adjacent."""
    if runs and runs[-1][1] == start:
        start, _ = runs.pop()
    runs.append((start, stop))


def first_blocks(runs: Sequence[BlockRun], count: int) -> Blocks:
    """The first `count` blocks; there must be so many."""
    taken: list[BlockRun] = []
    for run in runs:
        if count <= 0:
            break
        taken.append(run if run[1] - run[0] <= count else (run[0], run[0] + count))
        count -= run[1] - run[0]
    assert count <= 0, f"{count} blocks too few"
    return tuple(taken)


def cut_off(runs: list[BlockRun], count: int) -> Blocks:
    """Takes the last `count` blocks off `runs`, which must have so many; returns them."""
    cut: list[BlockRun] = []
    while count:
        assert runs, f"{count} blocks too few"
        start, stop = runs.pop()
        if stop - start > count:
            runs.append((start, stop - count))
            start = stop - count
        cut.append((start, stop))
        count -= stop - start
    cut.reverse()
    return tuple(cut)


def blocks_after(runs: Iterable[BlockRun], count: int) -> Blocks:
    """All but the first `count` blocks."""
    rest: list[BlockRun] = []
    for start, stop in runs:
        if start + count < stop:
            rest.append((start + max(count, 0), stop))
        count -= stop - start
    return tuple(rest)


def moved(runs: Iterable[BlockRun], copies: Sequence[BlockCopy]) -> list[BlockRun]:
    """The places of these blocks after the copies, which are in the order of their sources."""
    places: list[BlockRun] = []
    for start, stop in runs:
        for source, target, count in copies:
            if source >= stop or source + count <= start:
                continue
            if start < source:
                append_run(places, start, source)
                start = source
            end = min(source + count, stop)
            append_run(places, target + start - source, target + end - source)
            start = end
        if start < stop:
            append_run(places, start, stop)
    return places


def paired(source: Iterable[BlockRun], target: Iterable[BlockRun]) -> tuple[BlockCopy, ...]:
    """The copies of each block of `source` to the block of `target` in the same place; there are as many. Where no run
    could go on in the next one, no copy could either."""
    copies: list[BlockCopy] = []
    targets = iter(target)
    at = stop = 0
    for begin, end in source:
        while begin < end:
            if at == stop:
                run = next(targets, None)
                assert run, "fewer targets than sources"
                at, stop = run
            count = min(end - begin, stop - at)
            copies.append((begin, at, count))
            begin, at = begin + count, at + count
    assert at == stop and next(targets, None) is None, "more targets than sources"
    return tuple(copies)
