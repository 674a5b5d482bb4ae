"""Every model has an instance of its own, from its first request on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aegis.core.ids import InstanceId
from aegis.core.views import BatchView, DecodeView, Turn, TurnRules, Work

_RULES = TurnRules(prefetches=False, evicts=False)


@dataclass(frozen=True, slots=True)
class Dedicated:
    """Models that come when all instances are taken are refused."""

    rules: TurnRules = _RULES

    def place(self, work: Work, lists: DecodeView) -> InstanceId | None:
        if instances := lists.instances_of(work.model):
            return instances[0]
        free = (length.instance for length in lists.by_length if not lists.placed_models(length.instance).models)
        return next(free, None)

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        """A model has several batches if its requests do not fit into one."""
        return [Turn(batch.batch, None) for batch in batches]
