"""Request groups, swapped by deadline (QLM)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aegis.core.ids import InstanceId
from aegis.core.views import BatchView, DecodeView, Renewal, Turn, TurnRules, Work
from decode.policies.serverlessllm import idle_instance

_RULES = TurnRules(renewal=Renewal.TURN)


@dataclass(frozen=True, slots=True)
class Qlm:
    """Requests of one model form a group, which waits in the virtual queue of one instance.

    A request joins a group of its model; without one, it makes a group on an idle instance, else on the shortest queue.
    When a group is done, the group whose first token is due first follows: a group is not swapped out for another.
    """

    rules: TurnRules = _RULES

    def place(self, work: Work, lists: DecodeView) -> InstanceId:
        for share in lists.shares(work.model):
            if share.room_tokens >= work.tokens:
                return share.instance
        return idle_instance(work.model, lists) or lists.by_length[0].instance

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        return [Turn(batch.batch, None) for batch in sorted(batches, key=_due)]


def _due(batch: BatchView) -> tuple[bool, int, int]:
    """Requests that wait with their first token come after those without."""
    return (batch.first_due_ns is None, batch.first_due_ns or 0, batch.batch)
