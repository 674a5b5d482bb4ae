"""Attention over paged KV, for any model of transformers that takes an attention implementation.

One function is registered once under `NAME`. It has no entry in transformers' mask interface, which makes the
models build no mask at all (`masking_utils._preprocess_mask_arguments`): a step knows causality, and the window, the
soft cap and the sinks come as arguments.

A forward pass runs one step, `Prefill`, `Decode` or both as `Mixed`, made before it and handed over by `running`.
Whatever does not depend on the layer (which slots are written, which blocks read, which positions hidden) is computed
once per step.

A block is zeroed when its first position is written. What is gathered is then finite everywhere, and positions that
do not exist yet need no cleaning: their weight is exactly 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from aegis.core.errors import ModelRefused
from aegis.engine.accepted_layers import attends_causally, unsupported_arguments
from aegis.engine.block_table import BlockTable
from aegis.engine.scratch import Scratch
from aegis.engine.tensor_views import KvViews, LayerViews
from aegis.engine.tiled_attention import attend_tiles, first_tiled

NAME = "aegis_paged"

PADDING_TOKENS = 512
"""The padding, in tokens, up to which rows share one gather: it costs about as much as another gather."""

QUERY_ROWS = 512
"""The number of queries of a prefill that attend at a time if positions are hidden by a bias, which has this many
rows."""

FOLDED_ROWS = 256
"""Up to so many, query heads that share a KV head are rows of one product: a short piece of a long prompt reads and
orders its keys once then, not once for each of them."""

SCORES = 1 << 25
"""The largest number of scores at a time, of all heads, if attention is not fused."""

GATHER_BYTES = 1 << 20
"""The largest gather: bytes that were just copied should still be in a core's cache when they are read."""


class Kind(NamedTuple):
    """The properties of a layer's attention besides its weights. `scaling` None: 1/sqrt(key_dim)."""

    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # [query heads]: a logit per head that takes part in the softmax alone


class Step(Protocol):
    attended: int
    """The number of layers that have attended."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: Kind
    ) -> torch.Tensor:
        """Caches `key` and `value`, attends. All are `[batch, heads, tokens, dim]`, the result `[batch, tokens, heads,
        value_dim]`."""
        ...


class _Running(threading.local):
    step: Step | None = None
    between: Callable[[], None] | None = None


_running = _Running()


@contextmanager
def running(step: Step, between: Callable[[], None] | None = None) -> Iterator[None]:
    """Forward passes of this thread inside use `step`, and call `between` after each layer's attention. Passes do not
    nest."""
    assert _running.step is None
    _running.step, _running.between = step, between
    try:
        yield
    finally:
        _running.step = _running.between = None


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    step = _running.step
    assert step is not None, "a forward pass outside a step"
    unknown = unsupported_arguments(others)
    if attention_mask is not None:
        unknown.append("attention_mask")
    if unknown or not attends_causally(module, others):
        what = f"with {', '.join(unknown)}" if unknown else "that is not causal"
        raise ModelRefused(f"{type(module).__name__} asks for attention {what}, which aegis cannot compute")
    step.attended += 1
    kind = Kind(scaling, sliding_window or None, softcap or None, s_aux)
    mixed = step.attend(cast(int, module.layer_idx), query, key, value, kind)
    if _running.between is not None:
        _running.between()
    return mixed.contiguous(), None  # as transformers' own is: some models view it, where most reshape it


AttentionInterface.register(NAME, _attention)


def attend_dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, kind: Kind
) -> torch.Tensor:
    """Attention spelled out, for features that the fused one lacks: soft caps and sinks.

    `query [batch, heads, group, tokens, key_dim]`, `key` and `value` `[batch, heads, positions, dim]`, `bias` added to
    scores `[batch, heads, group, tokens, positions]`; the result is shaped as `query`, with value_dim.
    """
    batch, heads, group, tokens, key_dim = query.shape
    scores = torch.matmul(query.reshape(batch, heads, group * tokens, key_dim), key.transpose(2, 3))
    scores = scores.view(batch, heads, group, tokens, -1).mul_(kind.scaling or key_dim**-0.5)
    if kind.softcap is not None:
        scores = scores.div_(kind.softcap).tanh_().mul_(kind.softcap)
    if bias is not None:
        scores = scores.add_(bias)
    if kind.sinks is not None:
        sinks = kind.sinks.view(1, heads, group, 1, 1).expand(batch, -1, -1, tokens, -1)
        scores = torch.cat((scores, sinks.to(scores.dtype)), -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
    if kind.sinks is not None:
        weights = weights[..., :-1]
    mixed = torch.matmul(weights.reshape(batch, heads, group * tokens, -1), value)
    return mixed.view(batch, heads, group, tokens, -1)


class Prefill:
    """Positions `[start, stop)` of one sequence, written to its blocks, which hold the positions before."""

    def __init__(self, views: KvViews, scratch: Scratch, start: int, stop: int, blocks: BlockTable) -> None:
        size = views.block_tokens
        used = -(-stop // size)
        assert start < stop and used <= len(blocks)
        device = views.blocks.device
        rows = views.units(blocks[:used])
        positions = torch.arange(start, stop, device=device)
        self.attended = 0
        self._views = views
        self._scratch = scratch
        self._start, self._stop = start, stop
        self.tokens = stop - start
        self._units = torch.from_numpy(rows).to(device, non_blocking=True)
        self._slots = (self._units.repeat_interleave(size)[start:stop], positions % size)
        self._bias: tuple[tuple[object, ...], torch.Tensor] | None = None
        if start <= (used - 1) * size:
            views.blocks[int(rows[-1])].zero_()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: Kind
    ) -> torch.Tensor:
        cache = self._views.layers[layer]
        tokens = self.tokens
        cache.keys.index_put_(self._slots, key[0].transpose(0, 1).reshape(tokens, -1))
        cache.values.index_put_(self._slots, value[0].transpose(0, 1).reshape(tokens, -1))
        window = kind.window if kind.window is not None and kind.window < self._stop else None
        dense = kind.softcap is not None or kind.sinks is not None
        tiled = self._stop if dense else first_tiled(query, cache.heads, self._start, self._stop, window)
        first = 0  # position in `key` and `value`
        if self._start:
            first = _first_seen(self._start, window) // self._views.block_tokens * self._views.block_tokens
            key, value = self._cached(cache, first)
        mixed = []
        if tiled > self._start:
            until, there = tiled - self._start, tiled - first
            rows = self._attend(query[:, :, :until], key[:, :, :there], value[:, :, :there], first, kind, window)
            mixed.append(rows)
        if tiled < self._stop:
            behind = query[:, :, tiled - self._start :]
            mixed.append(attend_tiles(behind, key, value, tiled, window, kind.scaling, self._scratch))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, 1)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        first: int,
        kind: Kind,
        window: int | None,
    ) -> torch.Tensor:
        """The rows from the first one on, over `key` and `value` from position `first` on, in torch's own ways."""
        query_heads, tokens = query.shape[1:3]
        stop = self._start + tokens
        dense = kind.softcap is not None or kind.sinks is not None
        unfused = dense or key.shape[3] != value.shape[3]  # torch's fused attention wants them equal
        if self._start == 0 and window is None and not unfused:
            return _attend_fused(query, key, value, None, kind).transpose(1, 2)
        most = min(QUERY_ROWS, max(SCORES // (query_heads * stop), 1)) if unfused else QUERY_ROWS
        attend = _attend_folded if dense else _attend_fused
        mixed = []
        for at in range(self._start, stop, most):
            rows = slice(at, min(at + most, stop))
            seen = slice(_first_seen(at, window), rows.stop)
            bias = self._bias_of(rows, seen, window, query)
            queries = query[:, :, rows.start - self._start : rows.stop - self._start]
            there = slice(seen.start - first, seen.stop - first)
            mixed.append(attend(queries, key[:, :, there], value[:, :, there], bias, kind))
        return torch.cat(mixed, 2).transpose(1, 2)

    def _cached(self, cache: LayerViews, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the positions from `first`, where a block starts: `[1, heads, positions, dim]`."""
        units, size = self._units[first // self._views.block_tokens :], self._views.block_tokens
        count = self._stop - first
        both = []
        for place, cached, dim in (("keys", cache.keys, cache.key_dim), ("values", cache.values, cache.value_dim)):
            to = self._scratch.take(place, (units.numel(), size, cache.heads * dim), cached.dtype, cached.device)
            torch.index_select(cached, 0, units, out=to)
            both.append(to.view(1, -1, cache.heads, dim)[:, :count].transpose(1, 2))
        return both[0], both[1]

    def _bias_of(self, rows: slice, seen: slice, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """0 where position j of `seen` may be seen from i of `rows`, that is i - window < j <= i, else -inf. The last
        one is kept: the next rows within a window have the same, as has the next layer of a short prompt."""
        count, behind = rows.stop - rows.start, rows.start - seen.start
        key = (count, behind, window)
        if self._bias is None or self._bias[0] != key:
            hidden = torch.full((count, seen.stop - seen.start), -torch.inf, dtype=like.dtype, device=like.device)
            bias = hidden.triu(behind + 1)
            self._bias = (key, bias if window is None else bias.add_(hidden.tril_(behind - window)))
        return self._bias[1]


def _first_seen(position: int, window: int | None) -> int:
    """The first position that may be seen from that one."""
    return 0 if window is None else max(position - window + 1, 0)


def _attend_fused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, kind: Kind
) -> torch.Tensor:
    """`query [1, query_heads, tokens, key_dim]`, `key` and `value` `[1, heads, positions, dim]`; causal where there is
    no `bias [tokens, positions]`. The result is shaped as `query`, with value_dim."""
    _, query_heads, tokens, key_dim = query.shape
    heads = key.shape[1]
    group = query_heads // heads
    if bias is not None and 1 < group <= FOLDED_ROWS // tokens:
        rows = query.reshape(1, heads, group * tokens, key_dim)
        mixed = scaled_dot_product_attention(rows, key, value, attn_mask=bias.repeat(group, 1), scale=kind.scaling)
        return mixed.view(1, query_heads, tokens, -1)
    mixed = scaled_dot_product_attention(
        query.reshape(heads, group, tokens, key_dim),
        key[0].unsqueeze(1).expand(-1, group, -1, -1),
        value[0].unsqueeze(1).expand(-1, group, -1, -1),
        attn_mask=bias,
        is_causal=bias is None,
        scale=kind.scaling,
    )
    return mixed.reshape(1, query_heads, tokens, -1)


def _attend_folded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, kind: Kind
) -> torch.Tensor:
    """The same as `_attend_fused`, in single operations."""
    _, query_heads, tokens, key_dim = query.shape
    folded = query.reshape(1, key.shape[1], -1, tokens, key_dim)
    return attend_dense(folded, key, value, bias, kind).view(1, query_heads, tokens, -1)


@dataclass(frozen=True, slots=True)
class Gather:
    """Consecutive rows whose KV is read together: `[rows, length]` positions, some of them hidden by `bias`."""

    rows: slice
    length: int
    units: torch.Tensor  # [rows * blocks]
    bias: torch.Tensor | None  # [rows, 1, 1, length]; None: nothing is hidden


class Reading(NamedTuple):
    """A `Gather` for layers of one geometry: where blocks are copied to, and those bytes as K and V."""

    gather: Gather
    keys_to: torch.Tensor  # [blocks, block_tokens, heads * key_dim]
    values_to: torch.Tensor
    keys: torch.Tensor  # [rows, heads, length, key_dim]
    values: torch.Tensor


def reading(gather: Gather, cache: LayerViews, scratch: Scratch) -> Reading:
    _, size, _ = cache.keys.shape
    dtype, device = cache.keys.dtype, cache.keys.device
    blocks, rows = gather.units.numel(), gather.rows.stop - gather.rows.start
    keys = scratch.take("keys", (blocks, size, cache.heads * cache.key_dim), dtype, device)
    values = scratch.take("values", (blocks, size, cache.heads * cache.value_dim), dtype, device)
    return Reading(
        gather,
        keys,
        values,
        keys.view(rows, -1, cache.heads, cache.key_dim)[:, : gather.length].transpose(1, 2),
        values.view(rows, -1, cache.heads, cache.value_dim)[:, : gather.length].transpose(1, 2),
    )


class Decode:
    """One token for each of several sequences, of lengths `positions + 1`, longest first."""

    def __init__(
        self, views: KvViews, scratch: Scratch, positions: Sequence[int], blocks: Sequence[BlockTable]
    ) -> None:
        size = views.block_tokens
        assert all(a >= b for a, b in pairwise(positions)), "rows come longest first"
        self.attended = 0
        self._views = views
        self._scratch = scratch
        self._positions = positions
        self._units = [views.units(row[: at // size + 1]) for at, row in zip(positions, blocks, strict=True)]
        self._readings: dict[tuple[int, int | None], list[Reading]] = {}
        last = [int(units[-1]) for units in self._units]
        self._slots = (self._tensor(last), self._tensor([at % size for at in positions]))
        fresh = [unit for unit, at in zip(last, positions, strict=True) if at % size == 0]
        if fresh:
            views.blocks.index_fill_(0, self._tensor(fresh), 0)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: Kind
    ) -> torch.Tensor:
        cache = self._views.layers[layer]
        batch, query_heads, _, key_dim = query.shape
        cache.keys.index_put_(self._slots, key.reshape(batch, -1))
        cache.values.index_put_(self._slots, value.reshape(batch, -1))
        folded = query.reshape(batch, cache.heads, -1, key_dim)
        readings = self._readings.get((cache.geometry, kind.window))
        if readings is None:
            readings = [reading(gather, cache, self._scratch) for gather in self._plan(cache, kind.window)]
            self._readings[cache.geometry, kind.window] = readings
        if len(readings) == 1:
            mixed = _attend_rows(cache, readings[0], folded, kind)
        else:
            mixed = torch.cat([_attend_rows(cache, each, folded[each.gather.rows], kind) for each in readings])
        return mixed.reshape(batch, 1, query_heads, -1)

    def _plan(self, cache: LayerViews, window: int | None) -> Iterator[Gather]:
        """Cuts the rows into gathers: one grows while its padding and its size stay within bounds."""
        size = self._views.block_tokens
        firsts = [0 if window is None else max(at - window + 1, 0) for at in self._positions]
        lengths = [at + 1 - first // size * size for at, first in zip(self._positions, firsts, strict=True)]
        most = GATHER_BYTES // cache.token_bytes
        start, longest, total = 0, lengths[0], lengths[0]
        for row, length in enumerate(lengths[1:], 1):
            longest, total = max(longest, length), total + length
            padded = longest * (row + 1 - start)
            if padded - total > PADDING_TOKENS or padded > most:
                yield self._gather(slice(start, row), firsts, lengths)
                start, longest, total = row, length, length
        yield self._gather(slice(start, len(lengths)), firsts, lengths)

    def _gather(self, rows: slice, firsts: Sequence[int], lengths: Sequence[int]) -> Gather:
        size = self._views.block_tokens
        length = max(lengths[rows])
        blocks = -(-length // size)
        units = []
        for row, first in zip(self._units[rows], firsts[rows], strict=True):
            own = row[first // size :]
            units.append(own)
            if len(own) < blocks:  # any block of its own will do: it is hidden
                units.append(np.full(blocks - len(own), own[0]))
        together = torch.from_numpy(np.concatenate(units)).to(self._views.blocks.device)
        skipped = [first % size for first in firsts[rows]]
        if not any(skipped) and min(lengths[rows]) == length:
            return Gather(rows, length, together, None)
        at = torch.arange(length, device=together.device)
        hidden = (at < self._tensor(skipped)[:, None]) | (at >= self._tensor(lengths[rows])[:, None])
        bias = torch.zeros(hidden.shape, dtype=self._views.dtype, device=together.device)
        return Gather(rows, length, together, bias.masked_fill_(hidden, -torch.inf)[:, None, None, :])

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, device=self._views.blocks.device)


class Mixed:
    """Rows of several tokens each, one behind the other in the one sequence of the batch, and behind them rows of one
    token, for which `single` attends as for a batch of them."""

    def __init__(self, prompts: Sequence[Prefill], single: Step | None) -> None:
        self.attended = 0
        ends = list(accumulate(prompt.tokens for prompt in prompts))
        self._prompts = [(slice(end - prompt.tokens, end), prompt) for prompt, end in zip(prompts, ends, strict=True)]
        self._single = single
        self._first_single = ends[-1] if ends else 0

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: Kind
    ) -> torch.Tensor:
        mixed = [
            prompt.attend(layer, query[:, :, tokens], key[:, :, tokens], value[:, :, tokens], kind)
            for tokens, prompt in self._prompts
        ]
        if self._single is not None:
            of_rows = [each[0, :, self._first_single :].transpose(0, 1).unsqueeze(2) for each in (query, key, value)]
            mixed.append(self._single.attend(layer, of_rows[0], of_rows[1], of_rows[2], kind).transpose(0, 1))
        return torch.cat(mixed, 1)


def _attend_rows(cache: LayerViews, reading: Reading, query: torch.Tensor, kind: Kind) -> torch.Tensor:
    """`query [rows, heads, group, key_dim]`, so that all query heads of a KV head share its products."""
    gather, keys_to, values_to, keys, values = reading
    torch.index_select(cache.keys, 0, gather.units, out=keys_to)
    torch.index_select(cache.values, 0, gather.units, out=values_to)
    if kind.softcap is None and kind.sinks is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=gather.bias, scale=kind.scaling)
    bias = None if gather.bias is None else gather.bias.unsqueeze(1)
    return attend_dense(query.unsqueeze(3), keys, values, bias, kind).squeeze(3)
