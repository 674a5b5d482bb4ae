"""Requests that lack memory go where there is some.

If the KV of a model's requests on an instance outgrows the device, some of them wait until others have ended, however
little the model wants of the device's time. As many as lack room go on where there is room for them, and time.

Law: (P2) under constant loads such a move leaves nobody without room at its source, nor at its target, and the target
with time to spare, so that there are finitely many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from aegis.core.ids import InstanceId
from aegis.core.views import PPM
from aegis.core.wording import percent
from proxy.routing.demand import Demand
from proxy.routing.placement_views import Change, InstanceView, ModelView, PlacedLoad, PlacementView


class _Short(NamedTuple):
    """Requests of a model that want more than the memory of their instance. Those that lack room are `share_ppm` of
    their tokens; as whole requests they want `lacking_ppm` at most. In the order of what is lacking."""

    over_ppm: int
    source: InstanceId
    load: PlacedLoad
    share_ppm: int
    weights_ppm: int
    lacking_ppm: int


def moves(view: PlacementView, wanted_with: Callable[[InstanceView, Demand], int], most_ppm: int) -> Iterator[Change]:
    """Of the models that lack most memory first, each to the instance that wants the least of its device's time with
    those requests, as `wanted_with` says, and no more than `most_ppm`."""
    found = [_short(view, name, load) for name, each in view.instances.items() for load in each.loads]
    for short in sorted([each for each in found if each is not None]):
        options = [
            (wanted_ppm, target.instance)
            for target in view.instances.values()
            if (wanted_ppm := _wanted_ppm(view, short, target, wanted_with)) is not None and wanted_ppm <= most_ppm
        ]
        if options:
            yield _change(view, short, min(options)[1])


def _short(view: PlacementView, instance: InstanceId, load: PlacedLoad) -> _Short | None:
    """One that is alone would lack room anywhere. Where several proxies have requests there, each would have whole ones
    leave, and together more than lack room. Without KV none lacks room, whatever is counted for its blocks."""
    model = view.models.get(load.model)
    if model is None or not model.token_bytes or load.requests < 2 or not load.largest_tokens:
        return None
    memory_ppm = _memory_ppm(model, load)
    if memory_ppm <= PPM:
        return None
    kv_bytes = (load.tokens + load.ahead_tokens) * model.token_bytes
    kv_ppm = max(memory_ppm * kv_bytes // (model.weight_bytes + kv_bytes), 1)
    share_ppm = min(-(PPM * (PPM - memory_ppm) // kv_ppm), PPM)
    largest_ppm = kv_ppm * load.largest_tokens * model.token_bytes // kv_bytes
    lacking_ppm = min(memory_ppm - PPM + largest_ppm, kv_ppm)
    return _Short(PPM - memory_ppm, instance, load, share_ppm, memory_ppm - kv_ppm, lacking_ppm)


def _memory_ppm(model: ModelView, load: PlacedLoad) -> int:
    held_bytes = model.weight_bytes + load.tokens * model.token_bytes
    return load.memory_ppm * (held_bytes + load.ahead_tokens * model.token_bytes) // max(held_bytes, 1)


def _wanted_ppm(
    view: PlacementView,
    short: _Short,
    target: InstanceView,
    wanted_with: Callable[[InstanceView, Demand], int],
) -> int | None:
    """None: it is the same device, or they would lack room there, too."""
    if not set(view.instances[short.source].devices).isdisjoint(target.devices):
        return None
    load = short.load
    held = next((each for each in target.loads if each.model == load.model), None)
    there_ppm = _memory_ppm(view.models[load.model], held) if held else short.weights_ppm
    if there_ppm + short.lacking_ppm > PPM:
        return None
    if held:
        return wanted_with(target, Demand(load.steps_ppm * short.share_ppm // PPM, 0, short.lacking_ppm))
    return wanted_with(target, Demand(load.steps_ppm, load.loads_ppm, short.weights_ppm + short.lacking_ppm))


def _change(view: PlacementView, short: _Short, target: InstanceId) -> Change:
    model = short.load.model
    return Change(
        model,
        (target, *[home for home in view.models[model].places if home != target]),
        moves=True,
        because=f"its KV at {short.source} lacks {percent(-short.over_ppm)} of the memory, and {target} has room",
        source=short.source,
        share_ppm=short.share_ppm,
    )
