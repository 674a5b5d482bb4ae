"""The inputs of a decode step besides weights and KV, in device memory whose addresses never change.

Tokens, positions, lengths and block tables of all rows lie in one piece, written by one copy before the step: a CUDA
graph that was captured over them can be replayed for other rows. There are as many rows as the next bucket holds;
surplus rows have length 0, so that attention neither reads nor writes anything for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from aegis.engine.protocol import StepRow
from aegis.engine.tensor_views import KvViews

BUCKETS: tuple[int, ...] = (1, 2, 4, *range(8, 64, 8), *range(64, 257, 32))
"""Batches are padded to one of these."""

BLOCKS = 1 << 20
"""Entries of the block tables of all rows: 16 million tokens in blocks of 16."""


def bucket_of(rows: int) -> int:
    return BUCKETS[bisect_left(BUCKETS, rows)]


@dataclass(frozen=True, slots=True)
class Tables:
    """The places of the rows' KV: row r has `lengths[r]` positions, the new one included, in the views' rows
    `units[starts[r]:]`. All int32, on the device."""

    lengths: torch.Tensor  # [rows]
    starts: torch.Tensor  # [rows]
    units: torch.Tensor  # [blocks of all rows]


class DecodeInputs:
    """One step's inputs at a time, for all models of an engine."""

    def __init__(self, device: torch.device, *, blocks: int = BLOCKS) -> None:
        self._most = BUCKETS[-1]
        self._blocks = blocks
        size = 4 * self._most + blocks
        self._memory = torch.zeros(size, dtype=torch.int32, device=device)
        self._staging = torch.zeros(size, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host = self._staging.numpy()
        self._sent: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        header = self._memory[: 4 * self._most].view(4, self._most)
        self._tokens, self._positions, self._lengths, self._starts = header.unbind()
        self._units = self._memory[4 * self._most :]

    def parts(self, rows: Sequence[StepRow], block_tokens: int) -> Iterator[Sequence[StepRow]]:
        """The rows in as few steps as they fit in: one, as a rule."""
        start, blocks = 0, 0
        for at, row in enumerate(rows):
            needed = row.start // block_tokens + 1
            assert needed <= self._blocks
            if at - start == self._most or blocks + needed > self._blocks:
                yield rows[start:at]
                start, blocks = at, 0
            blocks += needed
        yield rows[start:]

    def load(self, rows: Sequence[StepRow], views: KvViews) -> int:
        """Sends what the next step needs, behind what the device is doing. Returns the bucket."""
        if self._sent is not None:
            self._sent.synchronize()  # it has passed, unless this step is a part of one
        host, most, bucket, count = self._host, self._most, bucket_of(len(rows)), len(rows)
        positions = np.fromiter((row.start for row in rows), np.int32, count)
        needed = (positions // views.block_tokens + 1).tolist()
        host[: 4 * most].reshape(4, most)[:, count:bucket] = 0
        host[:count] = [row.tokens[0] for row in rows]
        host[most : most + count] = positions
        host[2 * most : 2 * most + count] = positions + 1
        host[3 * most : 3 * most + count] = list(accumulate(needed[:-1], initial=0))
        blocks = np.concatenate([row.blocks[:n] for row, n in zip(rows, needed, strict=True)])
        used = 4 * most + len(blocks)
        host[4 * most : used] = units = views.units(blocks)
        self._zero(views, units[np.cumsum(needed) - 1][positions % views.block_tokens == 0])
        self._memory[:used].copy_(self._staging[:used], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        return bucket

    def _zero(self, views: KvViews, begun: NDArray[Any]) -> None:
        """Blocks whose first position is written in this step, as the other ways to attend do: what these gather of a
        block is finite everywhere."""
        if len(begun):
            places = torch.from_numpy(begun.astype(np.int64)).to(self._memory.device, non_blocking=True)
            views.blocks.index_fill_(0, places, 0)

    def tokens(self, bucket: int) -> torch.Tensor:
        """`[bucket, 1]`, int64."""
        return self._tokens[:bucket].long().unsqueeze(1)

    def positions(self, bucket: int) -> torch.Tensor:
        """`[bucket, 1]`, int64."""
        return self._positions[:bucket].long().unsqueeze(1)

    def tables(self, bucket: int) -> Tables:
        return Tables(self._lengths[:bucket], self._starts[:bucket], self._units)
