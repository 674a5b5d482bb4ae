"""Our placement: what no device has time for goes where there is time.

The load of a device is the share of its time that its requests want: a step of each of their models every TBT, loads of
what does not fit its memory, and the prompts that come. Of a device that wants more than `short_ppm`, the most loaded
one first, the model moves whose move leaves the more loaded of both devices with the least load. Requests that come
after that go where the scheduler says: it has seen where the others went, and finds another instance when that one has
no room.

Requests that lack memory come before (`proxy.policies.room`).

Law: (P1) a move of a model leaves both devices with less than the more loaded one had, so that under constant loads
there are finitely many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aegis.core.clock import NS_PER_S
from aegis.core.ids import InstanceId, ModelId
from aegis.core.views import PPM
from aegis.core.wording import percent
from proxy.policies import room
from proxy.routing.demand import NOTHING, Demand
from proxy.routing.placement_views import Change, InstanceView, PlacedLoad, PlacementRules, PlacementView

_RULES = PlacementRules(held_ns=NS_PER_S, settled_ns=3 * NS_PER_S, keeps=False)


class _Placed(NamedTuple):
    """What a model wants of an instance it is on; `prefill_ppm` is its part of the prompts that come."""

    instance: InstanceId
    load: PlacedLoad
    prefill_ppm: int

    @property
    def demand(self) -> Demand:
        return Demand(self.load.steps_ppm + self.prefill_ppm, self.load.loads_ppm, self.load.memory_ppm)


class _Device(NamedTuple):
    """What is on a device, however many instances have it: in all, and the two largest loads."""

    placed: tuple[_Placed, ...]
    demand: Demand
    first_ppm: int
    second_ppm: int

    @property
    def load_ppm(self) -> int:
        return _load_ppm(self.demand, self.first_ppm)

    def without_ppm(self, each: _Placed) -> int:
        largest_ppm = self.second_ppm if each.load.loads_ppm == self.first_ppm else self.first_ppm
        return _load_ppm(self.demand.instead(each.demand, NOTHING), largest_ppm)

    def with_ppm(self, wanted: Demand) -> int:
        return _load_ppm(self.demand.instead(NOTHING, wanted), max(self.first_ppm, wanted.loads_ppm))


class _Option(NamedTuple):
    """What the more loaded of both devices wants after a move, then what makes the order total."""

    worse_ppm: int
    memory_ppm: int
    model: ModelId
    source: InstanceId
    target: InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """The policy. A device that wants more than `short_ppm` of its time, in millionths, is short of it."""

    short_ppm: int = 800_000
    rules: PlacementRules = _RULES

    def changes(self, view: PlacementView) -> Sequence[Change]:
        devices = _devices(view)

        def wanted_with(target: InstanceView, wanted: Demand) -> int:
            return max([devices[number].with_ppm(wanted) for number in target.devices])

        lacking = next(room.moves(view, wanted_with, self.short_ppm), None)
        if lacking is not None:
            return [lacking]
        for hot in sorted(devices, key=lambda device: (-devices[device].load_ppm, device)):
            hot_ppm = devices[hot].load_ppm
            if hot_ppm <= self.short_ppm:
                break
            best = min(_options(view, hot, devices), default=None)
            if best is not None and best.worse_ppm < hot_ppm:
                return [_change(view, best, hot_ppm)]
        return []


def _devices(view: PlacementView) -> dict[int, _Device]:
    at_home = defaultdict[InstanceId, list[ModelId]](list)
    for model in view.models.values():
        for place in model.places:
            at_home[place].append(model.model)
    on = defaultdict[int, list[_Placed]](list)
    for instance in view.instances.values():
        placed = _placed(view, instance, at_home[instance.instance])
        for number in instance.devices:
            on[number] += placed
    return {number: _device(placed) for number, placed in on.items()}


def _device(placed: Sequence[_Placed]) -> _Device:
    demand, first_ppm, second_ppm = NOTHING, 0, 0
    for each in placed:
        demand = demand.instead(NOTHING, each.demand)
        load_ppm = each.load.loads_ppm
        second_ppm = max(second_ppm, min(load_ppm, first_ppm))
        first_ppm = max(first_ppm, load_ppm)
    return _Device(tuple(placed), demand, first_ppm, second_ppm)


def _placed(view: PlacementView, instance: InstanceView, at_home: Iterable[ModelId]) -> list[_Placed]:
    """Prompts are taken to come where the places of their model are, the same share to each."""
    loads = {load.model: load for load in instance.loads if load.model in view.models}
    placed = []
    for name in dict.fromkeys([*loads, *at_home]):
        places = view.models[name].places or (instance.instance,)
        share = view.models[name].prefill_ppm // len(places) if instance.instance in places else 0
        placed.append(_Placed(instance.instance, loads.get(name) or PlacedLoad(name, 0, 0, 0, 0, 0), share))
    return placed


def _load_ppm(demand: Demand, largest_ppm: int) -> int:
    """The load of a device. Where its memory does not hold all, the largest load counts besides: weights leave and come
    back whole, however little is lacking."""
    if demand.memory_ppm <= PPM:
        return demand.steps_ppm
    return min(demand.load_ppm + largest_ppm, demand.steps_ppm + demand.loads_ppm)


def _options(view: PlacementView, hot: int, devices: Mapping[int, _Device]) -> Iterator[_Option]:
    """The moves from that device to instances of others."""
    there = {each.instance for each in view.instances.values() if hot in each.devices}
    for each in devices[hot].placed:
        left_ppm, load = devices[hot].without_ppm(each), each.load
        places = view.models[load.model].places
        for name, target in view.instances.items():
            if name not in there and name not in places:
                worse_ppm = max([left_ppm, *[devices[number].with_ppm(each.demand) for number in target.devices]])
                yield _Option(worse_ppm, load.memory_ppm, load.model, each.instance, name)


def _change(view: PlacementView, chosen: _Option, hot_ppm: int) -> Change:
    others = [home for home in view.models[chosen.model].places if home != chosen.source]
    wanted, without = percent(hot_ppm), percent(chosen.worse_ppm)
    return Change(
        chosen.model,
        (chosen.target, *others),
        moves=True,
        because=f"{chosen.source}'s device wants {wanted} of its time, {without} without it",
        source=chosen.source,
        gain_ppm=hot_ppm - chosen.worse_ppm,
    )
