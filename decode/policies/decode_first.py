"""Unified token-level scheduling, decode steps first (Aegaeon §4.1, Figure 6 b)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from aegis.core.ids import InstanceId
from aegis.core.views import BatchView, DecodeView, Renewal, Turn, TurnRules, Work
from decode.policies.weighted_round_robin import WeightedRoundRobin

_TURNS = WeightedRoundRobin()
_RULES = TurnRules(renewal=Renewal.ROUND)


@dataclass(frozen=True, slots=True)
class DecodeFirst:
    """While any sequence decodes none is prefilled: batches take turns as with `WeightedRoundRobin`. When none decodes,
    the batch whose first token is due first is prefilled, all of it, and decodes."""

    turns: WeightedRoundRobin = _TURNS
    rules: TurnRules = _RULES

    def place(self, work: Work, lists: DecodeView) -> InstanceId:
        return self.turns.place(work, lists)

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        decoding = [batch for batch in batches if batch.waiting < len(batch.requests)]
        if decoding:
            return [replace(turn, prefills=False) for turn in self.turns.plan(decoding, now_ns)]
        first = min(batches, key=lambda batch: (batch.first_due_ns or 0, batch.batch))
        return [Turn(first.batch, None, decodes=False)]
