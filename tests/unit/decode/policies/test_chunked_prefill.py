"""Chunked prefill: a step has a chunk and the rows that decode, within the budget."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aegis.core.messages import Submit
from decode.policies.chunked_prefill import ChunkedPrefill
from decode.policies.weighted_round_robin import WeightedRoundRobin
from tests.sim.driven import decode, make_job
from tests.unit.decode.turns import A, settle, take


@pytest.mark.parametrize(("budget", "stops"), [(33, [32, 64, 96, 100]), (64, [48, 96, 100]), (8, [16, 32, 48, 64])])
def test_chunks_are_what_the_budget_leaves(budget: int, stops: list[int]) -> None:
    """Whole blocks of 16 tokens, beside one row that decodes; a block, at least."""
    policy = ChunkedPrefill(WeightedRoundRobin(q_max_ns=10**15))
    driven = decode(A, pages=40, policy=replace(policy, rules=replace(policy.rules, budget_tokens=budget)))
    take(driven, 1, A)
    settle(driven)
    driven.on(Submit(make_job(2, A, prompt=100)))
    driven.stepped(2)
    found = []
    for _ in stops:
        (row,) = driven.prompts()
        found.append(row.stop)
        driven.stepped(*((3, 2) if row.samples else (2,)))
    assert found == stops
