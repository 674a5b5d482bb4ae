from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from aegis.core.model import KvLayer, KvShape
from aegis.engine import paged_attention
from aegis.engine.paged_attention import Decode, Kind, Prefill
from aegis.engine.scratch import Scratch
from aegis.engine.tensor_views import KvViews
from tests.unit.engine.images import Arena

LAYER = KvLayer(2, 8, 4)
SHAPE = KvShape((KvLayer(1, 4, 4), LAYER), "float32", 4)
GROUP = 3
HEADS = LAYER.heads * GROUP

kinds = st.builds(
    Kind,
    st.sampled_from([None, 0.7]),
    st.sampled_from([None, 1, 5, 16, 17, 60]),
    st.sampled_from([None, 2.0]),
    st.sampled_from([None, torch.linspace(-1, 3, HEADS)]),
)


def reference(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Of the last position, by the definition. `query [heads, key_dim]`, `keys [tokens, kv_heads, key_dim]`."""
    tokens = keys.shape[0]
    visible = range(0 if kind.window is None else max(0, tokens - kind.window), tokens)
    out = []
    for head in range(HEADS):
        key, value = keys[visible, head // GROUP], values[visible, head // GROUP]
        scores = key @ query[head] * (kind.scaling or LAYER.key_dim**-0.5)
        if kind.softcap is not None:
            scores = torch.tanh(scores / kind.softcap) * kind.softcap
        if kind.sinks is not None:
            scores = torch.cat((scores, kind.sinks[head : head + 1]))
        out.append(scores.softmax(0)[: len(visible)] @ value)
    return torch.stack(out)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=5), kinds, st.integers(0, 99), st.integers(1, 3))
def test_prefill_and_decode_follow_the_definition(lengths: list[int], kind: Kind, seed: int, steps: int) -> None:
    """Over blocks scattered in memory that was full of NaN."""
    torch.manual_seed(seed)
    lengths = sorted(lengths, reverse=True)
    arena = Arena(slab_bytes=3 * SHAPE.block_bytes + 20, slabs=60, seed=seed)
    views = KvViews(arena.region, SHAPE)
    blocks = [arena.take(SHAPE, length + steps) for length in lengths]
    keys = [draw(length + steps, LAYER.heads, LAYER.key_dim) for length in lengths]
    values = [draw(length + steps, LAYER.heads, LAYER.value_dim) for length in lengths]
    for length, own, key, value in zip(lengths, blocks, keys, values, strict=True):
        query = draw(1, HEADS, length, LAYER.key_dim)
        heads_first = (part[:length].transpose(0, 1)[None] for part in (key, value))
        mixed = Prefill(views, Scratch(), 0, length, own).attend(1, query, *heads_first, kind)
        assert mixed.shape == (1, length, HEADS, LAYER.value_dim)
        for at in (0, length // 2, length - 1):
            expected = reference(query[0, :, at], key[: at + 1], value[: at + 1], kind)
            torch.testing.assert_close(mixed[0, at], expected, rtol=1e-4, atol=1e-5)
    scratch = Scratch()
    for step in range(steps):
        at = [length + step for length in lengths]
        query = draw(len(lengths), HEADS, 1, LAYER.key_dim)
        key = torch.stack([each[i][:, None] for each, i in zip(keys, at, strict=True)])
        value = torch.stack([each[i][:, None] for each, i in zip(values, at, strict=True)])
        mixed = Decode(views, scratch, at, blocks).attend(1, query, key, value, kind)
        assert mixed.shape == (len(lengths), 1, HEADS, LAYER.value_dim)
        for row, i in enumerate(at):
            expected = reference(query[row, :, 0], keys[row][: i + 1], values[row][: i + 1], kind)
            torch.testing.assert_close(mixed[row, 0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gather_bytes", [1, 1 << 12, 1 << 30])
@pytest.mark.parametrize("padding", [0, 1 << 20])
def test_how_rows_are_gathered_changes_nothing(
    gather_bytes: int, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "GATHER_BYTES", gather_bytes)
    monkeypatch.setattr(paged_attention, "PADDING_TOKENS", padding)
    check = test_prefill_and_decode_follow_the_definition.hypothesis.inner_test  # type: ignore[attr-defined]
    for kind in (Kind(None, None, None, None), Kind(None, 20, None, None), Kind(None, 20, 2.0, None)):
        check([1, 16, 16, 17, 48, 90, 90], kind, 0, 2)


@pytest.mark.parametrize(("rows", "scores"), [(1, 1 << 30), (7, 1 << 30), (512, 1), (512, 90 * HEADS * 5)])
def test_how_queries_are_cut_changes_nothing(rows: int, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "QUERY_ROWS", rows)
    monkeypatch.setattr(paged_attention, "SCORES", scores)
    check = test_prefill_and_decode_follow_the_definition.hypothesis.inner_test  # type: ignore[attr-defined]
    for window in (None, 1, 20):
        for softcap in (None, 2.0):
            check([90, 48, 17, 16, 1], Kind(None, window, softcap, None), 0, 1)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.nbytes = max(self.nbytes, out.nbytes)
        return out


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [100, None])
def test_memory_does_not_grow_with_the_square_of_the_prompt(
    window: int | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "SCORES", 1 << 19)
    tokens = 3000
    arena = Arena(slab_bytes=100 * SHAPE.block_bytes, slabs=4)
    step = Prefill(KvViews(arena.region, SHAPE), Scratch(), 0, tokens, arena.take(SHAPE, tokens))
    key, value = draw(1, LAYER.heads, tokens, LAYER.key_dim), draw(1, LAYER.heads, tokens, LAYER.value_dim)
    with Largest() as largest:
        step.attend(1, draw(1, HEADS, tokens, LAYER.key_dim), key, value, Kind(None, window, softcap, None))
    assert largest.nbytes <= 4 << 20
