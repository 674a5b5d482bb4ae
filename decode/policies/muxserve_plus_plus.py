"""Static places, flexible memory: MuxServe as Prism's evaluation has it (MuxServe++, §7.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aegis.core.clock import NS_PER_MS
from aegis.core.ids import InstanceId, ModelId
from aegis.core.views import BatchView, DecodeView, Renewal, Turn, TurnRules, Work
from decode.policies.shared_turns import shared_turns
from decode.policies.static_places import static_place

_RULES = TurnRules(renewal=Renewal.ARRIVAL, prefetches=False, evicts=False)


@dataclass(frozen=True, slots=True)
class MuxServePlusPlus:
    """Models have their places for good, by expected rates (`decode.policies.static_places`), and are never evicted.
    What their weights leave of a device is for the KV of whichever of them wants it.

    Models with work take turns, prompts first, those that came first before others. MuxServe searches its placement by
    a model of throughput, and gives each model a share of the SMs: neither is here, where one model steps at a time.
    """

    weights_bytes_max: int  # on an instance: the rest of its memory is for KV
    rates: Mapping[ModelId, float] = field(default_factory=dict)
    slice_ns: int = 50 * NS_PER_MS
    rules: TurnRules = _RULES

    def place(self, work: Work, lists: DecodeView) -> InstanceId | None:
        return static_place(work.model, lists, self.rates, self.weights_bytes_max)

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        return shared_turns(batches, self.slice_ns)
