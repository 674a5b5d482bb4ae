"""Grouped first-come-first-served prefill (Aegaeon §4.2, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aegis.core.estimators import Latency
from aegis.core.ids import ModelId
from aegis.core.views import PrefillPlacement, QueueView


@dataclass(frozen=True, slots=True)
class GroupedFcfs:
    """(1) Join the first group of the same model that has room; (2) else make a group on the least loaded instance,
    load being the estimated time of all its groups, switches included. Group sizes are cumulative, so that a hot model
    cannot refill a group for ever."""

    max_group_size: int = 8

    def place(
        self, model: ModelId, queues: Sequence[QueueView], latency: Mapping[ModelId, Latency]
    ) -> PrefillPlacement:
        for queue in queues:
            for group in queue.groups:
                if group.model == model and group.size < self.max_group_size:
                    return PrefillPlacement(queue.instance, group.group)
        least = min(queues, key=lambda queue: (load_ns(queue, latency), queue.instance))
        return PrefillPlacement(least.instance, None)


def load_ns(queue: QueueView, latency: Mapping[ModelId, Latency]) -> int:
    """The time to finish all pending groups: execution and switches (eq. 4 and 5)."""
    total, running = 0, queue.running
    for group in queue.groups:
        estimate = latency[group.model]
        if group.model != running:
            total += estimate.switch_ns()
            running = group.model
        total += sum(estimate.prefill_ns(tokens) for tokens in group.waiting_tokens)
    return total
