"""Prism's placement: the models that want KV the fastest first, each to the device under the least KV pressure.

The KV pressure ratio of a device (Prism §6.1): the rates at which its models' KV grows, each by its TBT, over the
memory that their weights leave. Algorithm 1: (1) models in the order of these rates, the highest first; (2) each goes
to the instance whose devices have the least ratio so far, unless that where it is is hardly worse; (3) its rate and
weights count there. A device that several instances share is one device, and so is each of a group of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from aegis.core.clock import NS_PER_S
from aegis.core.ids import InstanceId
from proxy.routing.placement_views import Change, InstanceView, ModelView, PlacementRules, PlacementView

_FULL = float("inf")
_RULES = PlacementRules(idle_ns=45 * NS_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPressureRatio:
    """`threshold` is by how much less pressed the best device has to be than the present one, the τ of Algorithm 1, as
    a part of the ratio of the whole pool. The paper does not give it. With half, eight models on two GPUs move 3 times
    in the 10 minutes of a public trace, as in the paper (§7.5)."""

    threshold: float = 0.5
    rules: PlacementRules = _RULES

    def changes(self, view: PlacementView) -> Sequence[Change]:
        rates, weights = defaultdict[int, float](float), defaultdict[int, int](int)

        def pressure(instance: InstanceView, model: ModelView) -> float:
            """The pressure of the instance with the model's weights there, and without the model's requests."""
            free = [instance.memory_bytes - weights[device] - model.weight_bytes for device in instance.devices]
            if min(free) <= 0:
                return _FULL
            return max(rates[device] / left for device, left in zip(instance.devices, free, strict=True))

        margin = self.threshold * _mean(view)
        wanted: list[Change] = []
        order = sorted(view.models.values(), key=lambda model: (-_rate(model), model.model))
        for model in order if view.instances else ():
            if not model.tokens_per_s:
                continue
            least, best = min((pressure(each, model), name) for name, each in view.instances.items())
            home = next((home for home in model.places if home in view.instances), None)
            chosen = best
            if home is not None and pressure(view.instances[home], model) <= least + margin:
                chosen = home
            for device in view.instances[chosen].devices:
                rates[device] += _rate(model)
                weights[device] += model.weight_bytes
            if (chosen,) != model.places:
                wanted.append(_change(model, chosen, home))
        return wanted


def _mean(view: PlacementView) -> float:
    """The ratio of all devices together, each model being on one of them, or on one group of ranks."""
    memory = {device: each.memory_bytes for each in view.instances.values() for device in each.devices}
    ranks = max([len(each.devices) for each in view.instances.values()], default=1)
    weights = sum([model.weight_bytes for model in view.models.values() if model.tokens_per_s])
    free = sum(memory.values()) - ranks * weights
    return ranks * sum([_rate(model) for model in view.models.values()]) / free if free > 0 else _FULL


def _rate(model: ModelView) -> float:
    """Bytes of KV per second, by the time between two tokens."""
    return model.tokens_per_s * model.token_bytes * NS_PER_S / model.tbt_ns


def _change(model: ModelView, chosen: InstanceId, home: InstanceId | None) -> Change:
    because = f"the least KV pressure; it was on {home}" if home else "the least KV pressure"
    return Change(model.model, (chosen,), moves=home not in (None, chosen), because=because)
