"""Unified token-level scheduling, prefills first (Aegaeon §4.1, Figure 6 a)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aegis.core.ids import InstanceId
from aegis.core.views import BatchView, DecodeView, Renewal, Turn, TurnRules, Work
from decode.policies.weighted_round_robin import WeightedRoundRobin

_TURNS = WeightedRoundRobin()
_RULES = TurnRules(renewal=Renewal.ARRIVAL)


@dataclass(frozen=True, slots=True)
class PrefillFirst:
    """Prefills come before any decode step, in order of their deadlines, a model's jobs together; batches that decode
    are preempted for them. Otherwise batches decode as with `WeightedRoundRobin`, the one that has waited longest
    first."""

    turns: WeightedRoundRobin = _TURNS
    rules: TurnRules = _RULES

    def place(self, work: Work, lists: DecodeView) -> InstanceId:
        return self.turns.place(work, lists)

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        waiting = sorted((b for b in batches if b.waiting), key=lambda b: (b.first_due_ns or 0, b.batch))
        if waiting:
            return [Turn(batch.batch, None, decodes=False) for batch in waiting]
        order = sorted(batches, key=lambda batch: (batch.decoded_ns, batch.batch))
        return self.turns.plan(order, now_ns)
