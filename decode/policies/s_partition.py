"""Static places, static memory: the static partition of Prism's evaluation (S-Partition, §7.1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aegis.core.clock import NS_PER_MS
from aegis.core.ids import InstanceId, ModelId
from aegis.core.views import BatchView, DecodeView, Renewal, Turn, TurnRules, Work
from decode.policies.shared_turns import shared_turns
from decode.policies.static_places import static_place

_RULES = TurnRules(renewal=Renewal.ARRIVAL, prefetches=False, evicts=False, divides_kv=True)


@dataclass(frozen=True, slots=True)
class SPartition:
    """As `MuxServePlusPlus`, but what weights leave of a device is cut in equal parts, one for the KV of each model
    that was ever asked for there. KV beyond its model's part moves to the host, though another part may be empty.

    The paper does not say how large the parts are. There compute is shared as the GPU shares it among processes; here
    one model steps at a time.
    """

    weights_bytes_max: int  # on an instance: the rest of its memory is for KV
    rates: Mapping[ModelId, float] = field(default_factory=dict)
    slice_ns: int = 50 * NS_PER_MS
    rules: TurnRules = _RULES

    def place(self, work: Work, lists: DecodeView) -> InstanceId | None:
        return static_place(work.model, lists, self.rates, self.weights_bytes_max)

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        return shared_turns(batches, self.slice_ns)
