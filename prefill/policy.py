"""Grouped first-come-first-served prefill (Aegaeon §4.2, Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass

from aegis.core.views import PrefillPlacement, PrefillView, Work


@dataclass(frozen=True, slots=True)
class GroupedFcfs:
    """(1) Join the first group of the same model that has room; (2) else make a group on the least loaded instance,
    load being the estimated time of all its groups, switches included. Group sizes are cumulative, so that a hot model
    cannot refill a group for ever."""

    max_group_size: int = 8

    def place(self, work: Work, queues: PrefillView) -> PrefillPlacement:
        for group in queues.open_groups(work.model):
            return PrefillPlacement(group.instance, group.group)
        return PrefillPlacement(queues.by_load[0].instance, None)
