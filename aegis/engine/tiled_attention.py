"""Attention of many queries over many positions in bfloat16 on a CPU, by oneDNN's matrix products.

torch's fused attention reaches a fifth of the speed of these products. So queries are cut into tiles whose scores stay
near the core: a product makes the scores of a tile, a softmax turns them into weights in place, and another product
mixes the values.

oneDNN rounds scores to bfloat16, to a relative 2^-9, where fused attention keeps float32. A softmax does not change if
a number is subtracted from a row, and products add in float32 what a tile held before, so each row begins with minus
what is likely its largest score: the largest among the first positions, which many heads look at whatever the text says
(Xiao et al., StreamingLLM, section 3), and the last ones. Scores that decide are near zero then, where rounding is
fine. Where the guess is bad, rounding is that of attention spelled out in bfloat16.
"""

from __future__ import annotations

from functools import cache

import torch

from aegis.engine.scratch import Scratch

TILE_ROWS = 256
"""The largest number of rows in a product, of all query heads that share a KV head: beyond it oneDNN gains nothing."""

TILE_SCORES = 1 << 21
"""The largest number of scores of a tile: 4 MiB."""

FIRST_ROW = 256
"""Rows with fewer positions behind them are left to fused attention, which is as fast there."""

SAMPLED = 128
"""The number of first, and of last, positions among which the largest score is guessed."""

WORTHWHILE_SCORES = 1 << 16
"""The number of scores of a KV head from which on a tile takes less time than fused attention."""


@cache
def _has_products() -> bool:
    """Whether oneDNN multiplies in bfloat16 on this processor."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is not None and bool(supported())


def first_tiled(query: torch.Tensor, heads: int, start: int, stop: int, window: int | None) -> int:
    """From which row on the rows `[start, stop)` are attended in tiles: `stop` if none is. `query [1, query_heads,
    tokens, key_dim]`."""
    if query.dtype != torch.bfloat16 or query.device.type != "cpu" or not _has_products():
        return stop
    if window is not None and window < TILE_ROWS + 2 * SAMPLED:
        return stop
    first = max(start, FIRST_ROW)
    seen = stop if window is None else min(stop, window)
    rows = (stop - first) * (query.shape[1] // heads)
    return first if rows * seen >= WORTHWHILE_SCORES else stop


def attend_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    window: int | None,
    scaling: float | None,
    scratch: Scratch,
) -> torch.Tensor:
    """Rows `start, start + 1, …` attend causally, within the window if there is one. `query [1, query_heads, tokens,
    key_dim]`, `key` and `value` `[1, heads, positions, dim]` of the last positions up to the last row's; the result
    `[1, tokens, query_heads, value_dim]`."""
    _, query_heads, tokens, key_dim = query.shape
    heads, positions, value_dim = value.shape[1:]
    group, first = query_heads // heads, start + tokens - positions
    scale = key_dim**-0.5 if scaling is None else scaling
    mixed = torch.empty((tokens, query_heads, value_dim), dtype=query.dtype)
    seen = positions if window is None else min(positions, window + TILE_ROWS)
    step = max(min(TILE_ROWS, TILE_SCORES // seen) // group, 1)
    for begin in range(0, tokens, step):
        end = min(begin + step, tokens)
        count = end - begin
        behind = start + begin - first  # the number of positions before the tile
        lowest = 0 if window is None else max(behind - window + 1, 0)  # that one of its rows sees
        common = 0 if window is None else max(behind + count - window, 0)  # the first that all of them see
        width = behind + count - lowest
        scores = scratch.take("scores", (group * count, width), query.dtype, query.device)
        by_head = scores.view(group, count, width)
        hidden = _above_diagonal(count, query.dtype)
        for head in range(heads):
            rows = query[0, head * group : (head + 1) * group, begin:end].reshape(-1, key_dim)
            keys = key[0, head].t()
            ends = (keys[:, common : common + SAMPLED], keys[:, behind - SAMPLED : behind])
            likely = [torch.mm(rows, some).amax(1, keepdim=True) for some in ends]
            scores.copy_(torch.maximum(*likely).mul_(-scale).expand(-1, width))
            scores.addmm_(rows, keys[:, lowest : behind + count], alpha=scale)
            by_head[..., width - count :].add_(hidden)
            if common > lowest:
                by_head[..., : common - lowest].add_(_hidden_by_window(count, common - lowest, query.dtype))
            torch.softmax(scores, 1, out=scores)
            own = torch.mm(scores, value[0, head, lowest : behind + count])
            mixed[begin:end, head * group : (head + 1) * group] = own.view(group, count, value_dim).transpose(0, 1)
    return mixed[None]


def _above_diagonal(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """-inf where the column comes after the row, else 0."""
    return torch.full((rows, rows), -torch.inf, dtype=dtype).triu_(1)


def _hidden_by_window(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """-inf where a row may not see one of the `columns` positions that the tile's first row sees and its last does
    not, else 0."""
    return torch.full((rows, columns), -torch.inf, dtype=dtype).tril_(columns - rows)
