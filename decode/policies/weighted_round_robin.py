"""Weighted round-robin decoding (Aegaeon §4.3, Algorithm 2, eq. 2 and 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from typing import Final

from aegis.core.clock import NS_PER_S
from aegis.core.decision import Plan, Why
from aegis.core.ids import InstanceId, ModelId
from aegis.core.views import BatchView, DecodeView, Turn, TurnRules, Work
from aegis.core.wording import ALONE, duration
from decode.reasons import why

_ALPHA_FLOOR: Final = 0.5
_RULES: Final = TurnRules()


@dataclass(frozen=True, slots=True)
class WeightedRoundRobin:
    """(1) A request joins a batch of its model that has room, else the instance with the shortest work list;
    (2) a round gives each batch the quota of eq. 2, batches of one model side by side.

    Q_MAX keeps turns from growing for ever, and 4 s suit devices where a switch takes the better part of a second.
    Where it takes milliseconds, turns of 4 s would save nothing and stall everybody else: then Q_MAX is the turn at
    which switching takes `switching_share` of a round, c / (c + Σ q).
    """

    q_max_ns: int = 4 * NS_PER_S
    switching_share: float = 0.05
    rules: TurnRules = _RULES

    def place(self, work: Work, lists: DecodeView) -> InstanceId:
        for share in lists.shares(work.model):
            if share.room_tokens >= work.tokens:
                return share.instance
        return lists.by_length[0].instance

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        order = _side_by_side(batches)
        q_max_ns = min(self.q_max_ns, self._worthwhile_ns(order))
        return [Turn(b.batch, q) for b, q in zip(order, quotas_ns(order, q_max_ns), strict=True)]

    def why_turn(self, plan: Plan, at: int) -> Why:
        batch, count = plan.batch(at), len(plan.turns)
        assert batch is not None
        share = f"a step takes {batch.step_ns / max(batch.tbt_ns, 1):.0%} of the time between two tokens"
        if count == 1:
            return why(plan, at, f"{ALONE}; {share}")
        q_max_ns = min(self.q_max_ns, self._worthwhile_ns(plan.batches))
        switches = f"switches take {duration(switches_ns(plan.batches))} of a round"
        return why(plan, at, f"turn {at + 1} of {count}; {share}, {switches}, Q_MAX is {duration(q_max_ns)}")

    def why_place(self, work: Work, lists: DecodeView, chosen: InstanceId) -> Why:
        for share in lists.shares(work.model):
            if share.instance == chosen and share.room_tokens >= work.tokens:
                return Why(f"joins {share.requests} of its model, with room for {share.room_tokens} tokens")
        lost = next((length for length in lists.by_length if length.instance != chosen), None)
        shortest = f"no batch of its model has room; shortest list: {lists.batches(chosen)} batches"
        return Why(f"{shortest}, {lost.instance} has {lost.batches}" if lost else shortest, lost=lost and lost.instance)

    def _worthwhile_ns(self, batches: Sequence[BatchView]) -> int:
        c = switches_ns(batches)
        share = self.switching_share
        return round(c * (1 - share) / (share * len(batches))) if c and share else self.q_max_ns


def switches_ns(batches: Sequence[BatchView]) -> int:
    """c of eq. 2: what bringing in each model of the list once takes; nothing where there is only one."""
    switch_ns = {b.model: b.switch_ns for b in batches}
    return sum(switch_ns.values()) if len(switch_ns) > 1 else 0


def quotas_ns(batches: Sequence[BatchView], q_max_ns: int) -> list[int]:
    """Eq. 2 and 3. With n_k = d_k / t_k and c the sum of the switches of all models in the list,

    α = max(c / (min n · Q_MAX) + Σ 1/n_k, 0.5) and q_i = c / (n_i (α − Σ 1/n_k)).

    Where nothing has to be switched (one model), c is 0 and eq. 2 has no answer: the quota is Q_MAX. So it is where
    α − Σ 1/n vanishes otherwise.
    """
    c = switches_ns(batches)
    n = [max(b.tbt_ns, 1) / b.step_ns for b in batches]
    share = fsum(1 / x for x in n)  # rounded once, whatever the order: the same on any machine
    alpha = max(c / (min(n) * q_max_ns) + share, _ALPHA_FLOOR)
    if c == 0 or alpha <= share:
        return [q_max_ns] * len(batches)
    return [round(c / (x * (alpha - share))) for x in n]


def _side_by_side(batches: Sequence[BatchView]) -> list[BatchView]:
    """Batches of one model adjacent, models in the order of their first batch."""
    first: dict[ModelId, int] = {}
    for index, batch in enumerate(batches):
        first.setdefault(batch.model, index)
    return sorted(batches, key=lambda b: first[b.model])
