"""Chunked prefill: each step has the rows that decode and what a token budget leaves of a prompt (Sarathi-Serve)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aegis.core.ids import InstanceId
from aegis.core.views import BatchView, DecodeView, Turn, TurnRules, Work
from decode.policies.weighted_round_robin import WeightedRoundRobin

_TURNS = WeightedRoundRobin()
_RULES = TurnRules(chunk_tokens=16, budget_tokens=512, join_gain=float("inf"))


@dataclass(frozen=True, slots=True)
class ChunkedPrefill:
    """Prompts run in the order of their ranks, a chunk in each step with the rows that decode; `rules.budget_tokens` is
    what MuxWise tunes offline for each workload (§4.1). Models take turns as with `WeightedRoundRobin`."""

    turns: WeightedRoundRobin = _TURNS
    rules: TurnRules = _RULES

    def place(self, work: Work, lists: DecodeView) -> InstanceId:
        return self.turns.place(work, lists)

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        return self.turns.plan(batches, now_ns)
