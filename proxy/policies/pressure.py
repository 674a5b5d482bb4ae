"""Our placement: what no device has time for goes where there is time, and a model that one instance has no time for is
served by several.

The load of a device is the share of its time that its requests want: a step of each of their models every TBT, loads of
what does not fit its memory, and the prompts that come. (1) While the most loaded device wants more than `short_ppm`,
the model moves whose move leaves the more loaded of both devices with the least load. (2) If none leaves them with
less, a model on it that wants more than `short_ppm` by itself gets another instance for half of what comes, the least
loaded one. (3) One of several instances of a model whose whole load the others would have less than `spare_ppm` with
gives its requests to them.

Laws: (P1) a move leaves both devices with less than the more loaded one had, so that under constant loads there are
finitely many; (P2) an instance that a model was given for (2) is not taken by (3) under the same load, because
`spare_ppm` is less than `short_ppm`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aegis.core.clock import NS_PER_S
from aegis.core.ids import InstanceId, ModelId
from proxy.routing.demand import NOTHING, Demand
from proxy.routing.placement_views import Change, InstanceView, PlacedLoad, PlacementRules, PlacementView

_RULES = PlacementRules(held_ns=3 * NS_PER_S)


class _Placed(NamedTuple):
    """What a model wants of an instance it is on; `prefill_ppm` is its part of the prompts that come."""

    instance: InstanceId
    load: PlacedLoad
    prefill_ppm: int

    @property
    def demand(self) -> Demand:
        return Demand(self.load.steps_ppm + self.prefill_ppm, self.load.loads_ppm, self.load.memory_ppm)


class _Option(NamedTuple):
    """What the more loaded of both devices wants after a move, then what makes the order total."""

    worse_ppm: int
    memory_ppm: int
    model: ModelId
    source: InstanceId
    target: InstanceId


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """In millionths of a device's time."""

    short_ppm: int = 800_000
    spare_ppm: int = 600_000
    rules: PlacementRules = _RULES

    def changes(self, view: PlacementView) -> Sequence[Change]:
        placed = [each for instance in view.instances.values() for each in _placed(view, instance)]
        loads = _loads(view, placed)
        if len(loads) < 2:
            return []
        hot = max(loads, key=lambda device: (loads[device].load_ppm, -device))
        hot_ppm = loads[hot].load_ppm
        if hot_ppm <= self.short_ppm:
            return self._fewer(view, placed)
        on_it = [each for each in placed if hot in view.instances[each.instance].devices]
        options = [option for each in on_it for option in _options(view, each, hot, loads)]
        best = min(options, default=None)
        if best is not None and best.worse_ppm < hot_ppm:
            places = tuple([best.target if home == best.source else home for home in view.models[best.model].places])
            first = (best.target, *[home for home in places if home != best.target])
            because = f"{best.source}'s device wants {_share(hot_ppm)} of its time, {_share(best.worse_ppm)} without it"
            gain_ppm = hot_ppm - best.worse_ppm
            return [Change(best.model, first, moves=True, because=because, source=best.source, gain_ppm=gain_ppm)]
        return self._more(view, on_it, loads)

    def _more(self, view: PlacementView, on_it: Iterable[_Placed], loads: Mapping[int, Demand]) -> list[Change]:
        for each in sorted(on_it, key=lambda each: (-each.demand.steps_ppm, each.load.model)):
            model = view.models[each.load.model]
            free = [i for i in view.instances.values() if i.instance not in model.places]
            free = [i for i in free if not set(i.devices) & set(view.instances[each.instance].devices)]
            if each.demand.steps_ppm <= self.short_ppm or not free:
                continue
            least_ppm, target = min((_most(loads, i.devices), i.instance) for i in free)
            after_ppm = least_ppm + each.load.steps_ppm + each.prefill_ppm // 2
            if after_ppm < _most(loads, view.instances[each.instance].devices):
                because = f"it wants {_share(each.demand.steps_ppm)} of {each.instance}'s time by itself"
                return [
                    Change(model.model, (*(model.places or (each.instance,)), target), moves=False, because=because)
                ]
        return []

    def _fewer(self, view: PlacementView, placed: Sequence[_Placed]) -> list[Change]:
        loads = _loads(view, placed)
        for model in view.models.values():
            mine = [each for each in placed if each.load.model == model.model and each.instance in model.places]
            if len(model.places) < 2 or not mine:
                continue
            last = model.places[-1]
            leaving = sum([each.demand.steps_ppm for each in mine if each.instance == last])
            staying = model.places[:-1]
            if all(_most(loads, view.instances[home].devices) + leaving < self.spare_ppm for home in staying):
                because = f"without {last} its instances want less than {_share(self.spare_ppm)} of their time"
                return [Change(model.model, staying, moves=True, because=because, source=last)]
        return []


def _placed(view: PlacementView, instance: InstanceView) -> list[_Placed]:
    """Prompts are taken to come where the places of their model are, the same share to each."""
    loads = {load.model: load for load in instance.loads if load.model in view.models}
    at_home = [model.model for model in view.models.values() if instance.instance in model.places]
    placed = []
    for name in dict.fromkeys([*loads, *at_home]):
        places = view.models[name].places or (instance.instance,)
        share = view.models[name].prefill_ppm // len(places) if instance.instance in places else 0
        placed.append(_Placed(instance.instance, loads.get(name) or PlacedLoad(name, 0, 0, 0, 0, 0), share))
    return placed


def _loads(view: PlacementView, placed: Iterable[_Placed]) -> dict[int, Demand]:
    """Of each device, however many instances have it."""
    loads = defaultdict[int, Demand](lambda: NOTHING)
    for instance in view.instances.values():
        for device in instance.devices:
            loads[device] = loads[device]
    for each in placed:
        for device in view.instances[each.instance].devices:
            loads[device] = loads[device].instead(NOTHING, each.demand)
    return dict(loads)


def _options(view: PlacementView, each: _Placed, hot: int, loads: Mapping[int, Demand]) -> Iterable[_Option]:
    """The moves of that to instances of other devices."""
    left_ppm = loads[hot].instead(each.demand, NOTHING).load_ppm
    there = {load.instance for load in view.instances.values() if hot in load.devices}
    places = view.models[each.load.model].places
    for name, target in view.instances.items():
        if name in there or name in places:
            continue
        taken_ppm = max([loads[device].instead(NOTHING, each.demand).load_ppm for device in target.devices])
        worse_ppm = max(left_ppm, taken_ppm)
        yield _Option(worse_ppm, each.load.memory_ppm, each.load.model, each.instance, name)


def _most(loads: Mapping[int, Demand], devices: Iterable[int]) -> int:
    return max([loads[device].load_ppm for device in devices])


def _share(load_ppm: int) -> str:
    return f"{load_ppm / 10_000:.0f} %"
