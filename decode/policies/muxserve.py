"""Static multiplexing: several models share a device, all of them resident (like MuxServe and AlpaServe)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aegis.core.clock import NS_PER_MS
from aegis.core.ids import InstanceId
from aegis.core.views import BatchView, DecodeView, Renewal, Turn, TurnRules, Work

_SLICE_NS = 50 * NS_PER_MS
_RULES = TurnRules(renewal=Renewal.ARRIVAL, prefetches=False, evicts=False)


@dataclass(frozen=True, slots=True)
class MuxServe:
    """A model's first request gives it the instance with the fewest bytes of weights on which it fits; there it stays.
    A model that fits nowhere is refused. Nothing is ever evicted.

    Models with work take turns that are shorter than the time between two tokens may be, prefills first. MuxServe also
    places models by their expected rates and runs several of them at once on parts of a device; neither is here.
    """

    weights_bytes_max: int  # on an instance: the rest of its memory is for KV
    models_max: int = 1 << 30  # on an instance
    slice_ns: int = _SLICE_NS
    rules: TurnRules = _RULES

    def place(self, work: Work, lists: DecodeView) -> InstanceId | None:
        if instances := lists.instances_of(work.model):
            return instances[0]
        weight_bytes = lists.weight_bytes(work.model)
        fitting = []
        for _, instance in lists.by_length:
            placed = lists.placed_models(instance)
            if placed.models < self.models_max and placed.weight_bytes + weight_bytes <= self.weights_bytes_max:
                fitting.append((placed.weight_bytes, instance))
        return min(fitting)[1] if fitting else None

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        waiting = [Turn(batch.batch, None, decodes=False) for batch in batches if batch.waiting]
        if waiting:
            return waiting
        order = sorted(batches, key=lambda batch: (batch.decoded_ns, batch.batch))
        return [Turn(batch.batch, self.slice_ns if len(order) > 1 else None) for batch in order]
