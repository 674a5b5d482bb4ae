"""Places for good: models on instances by their expected rates, as an operator plans them."""

from __future__ import annotations

from collections.abc import Mapping

from aegis.core.ids import InstanceId, ModelId
from aegis.core.views import DecodeView


def static_place(
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
