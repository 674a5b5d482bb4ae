"""Shapes of KV caches and deadlines of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.model import KvLayer, KvShape, Slo


@pytest.mark.parametrize(
    ("layers", "heads", "dim", "token_kb"),
    [(32, 32, 128, 512), (32, 8, 128, 128), (40, 40, 128, 800), (80, 64, 128, 2560)],
    ids=["Qwen-7B", "InternLM2.5-7B", "LLaMA-13B", "Qwen-72B"],
)
def test_sizes_are_those_of_the_papers_table_1(layers: int, heads: int, dim: int, token_kb: int) -> None:
    shape = KvShape((KvLayer(heads, dim, dim),) * layers, "bfloat16", 2)
    assert shape.token_bytes == token_kb * 1024
    assert shape.block_bytes == 16 * shape.token_bytes


def test_layers_may_differ_and_keys_from_values() -> None:
    shape = KvShape((KvLayer(2, 192, 128), KvLayer(1, 64, 64)), "float32", 4, block_tokens=8)
    assert shape.token_bytes == 4 * (2 * (192 + 128) + 64 + 64)
    assert shape.block_bytes == 8 * shape.token_bytes


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_blocks_hold_the_tokens_and_none_is_too_many(tokens: int, block_tokens: int) -> None:
    blocks = KvShape((KvLayer(1, 1, 1),), "float32", 4, block_tokens).blocks_for(tokens)
    assert blocks * block_tokens >= tokens > (blocks - 1) * block_tokens or blocks == tokens == 0


def test_token_i_is_due_after_the_first_ones_time_and_i_intervals() -> None:
    slo = Slo()
    assert (slo.ttft_ns, slo.tbt_ns) == (10 * NS_PER_S, 100 * NS_PER_MS)
    assert slo.due_ns(5, 0) == 5 + slo.ttft_ns
    assert slo.due_ns(5, 1) == 5 + 10_100_000_000
    assert Slo(ttft_ns=3, tbt_ns=2).due_ns(100, 10) == 123
