"""Grouped first-come-first-served prefill (Aegaeon §4.2, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

from aegis.core.decision import Why
from aegis.core.views import PrefillPlacement, PrefillView, Work
from aegis.core.wording import duration


@dataclass(frozen=True, slots=True)
class GroupedFcfs:
    """(1) Join the first group of the same model that has room; (2) else make a group on the least loaded instance,
    load being the estimated time of all its groups, switches included. Group sizes are cumulative, so that a busy model
    cannot refill a group for ever."""

    max_group_size: int = 8

    def place(self, work: Work, queues: PrefillView) -> PrefillPlacement:
        for group in queues.open_groups(work.model):
            return PrefillPlacement(group.instance, group.group)
        return PrefillPlacement(queues.by_load[0].instance, None)

    def why_group(self, work: Work, queues: PrefillView, chosen: PrefillPlacement) -> Why:
        for group in queues.open_groups(work.model):
            if (group.instance, group.group) == (chosen.instance, chosen.group):
                return Why(f"joins the first group of its model with room: {group.size} of {self.max_group_size}")
        because = f"no group of its model has room; least work: {duration(queues.load_ns(chosen.instance))}"
        lost = next((load for load in queues.by_load if load.instance != chosen.instance), None)
        if lost is None:
            return Why(because)
        return Why(f"{because}, {lost.instance} has {duration(lost.load_ns)}", lost=lost.instance)
