"""Places for good: the static rivals of Prism's evaluation (§7.1), which differ only in whose the memory for KV is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aegis.core.clock import NS_PER_MS
from aegis.core.ids import InstanceId, ModelId
from aegis.core.views import BatchView, DecodeView, Renewal, Turn, TurnRules, Work
from decode.policies.shared_turns import shared_turns

SHARED_KV = TurnRules(renewal=Renewal.ARRIVAL, prefetches=False, evicts=False)
"""What weights leave of a device is for the KV of whichever model wants it, as in MuxServe++."""

DIVIDED_KV = TurnRules(renewal=Renewal.ARRIVAL, prefetches=False, evicts=False, divides_kv=True)
"""It is cut in equal parts, one for the KV of each model that was ever asked for there, as in S-Partition: KV beyond
the part of its model moves to the host, though another may be empty. The paper does not say how large parts are."""


@dataclass(frozen=True, slots=True)
class StaticPlaces:
    """Models have their places for good, by expected rates, as an operator plans them, and are never evicted.

    Models with work take turns, prompts first, in the order in which these came. One model steps at a time. MuxServe
    searches its placement by a model of throughput and gives each model a share of the SMs, and models of S-Partition
    share a GPU as processes do; neither is here.
    """

    weights_bytes_max: int  # on an instance: the rest of its memory is for KV
    rates: Mapping[ModelId, float] = field(default_factory=dict)
    slice_ns: int = 50 * NS_PER_MS
    rules: TurnRules = SHARED_KV

    def place(self, work: Work, lists: DecodeView) -> InstanceId | None:
        return _place(work.model, lists, self.rates, self.weights_bytes_max)

    def plan(self, batches: Sequence[BatchView], now_ns: int) -> list[Turn]:
        return shared_turns(batches, self.slice_ns)


def _place(
    model: ModelId, lists: DecodeView, rates: Mapping[ModelId, float], weights_bytes_max: int
) -> InstanceId | None:
    """Where the model was placed, there it stays. Else models without a place are given one in order of their rates,
    the highest first: of the instances with room for their weights the one that has the least rate, then the fewest
    bytes. None: it fits nowhere."""
    if instances := lists.instances_of(model):
        return instances[0]
    taken = {length.instance: lists.placed_models(length.instance).weight_bytes for length in lists.by_length}
    load = dict.fromkeys(taken, 0.0)
    unplaced = {model: rates.get(model, 0.0)}
    for name, rate in rates.items():
        homes = [home for home in lists.instances_of(name) if home in load]
        if homes:
            load[homes[0]] += rate
        else:
            unplaced[name] = rate
    for name in sorted(unplaced, key=lambda name: (-unplaced[name], name)):
        nbytes = lists.weight_bytes(name)
        fitting = [
            (load[instance], placed, instance)
            for instance, placed in taken.items()
            if placed + nbytes <= weights_bytes_max
        ]
        chosen = min(fitting)[2] if fitting else None
        if name == model:
            return chosen
        if chosen is not None:
            load[chosen] += unplaced[name]
            taken[chosen] += nbytes
    raise AssertionError(f"{model} is among the models without a place")
