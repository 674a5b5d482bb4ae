"""A request goes to the home of its model, unless another instance is under less pressure.

The home is the instance of the last request of the model. The request goes elsewhere if the instance under the least
pressure is better off by `migrate_share` of its time; or better off at all, if the request cannot join the one batch of
its model at home, because there is none, no room in it, or more than one already: batches run on several instances
rather than wait for each other's turns on one.

The pressure of an instance includes a load of the model there, unless its weights should be there already, and another
one if there is no room for all weights: they leave and come back whole, however little is lacking. A load that takes
the part p of the TTFT counts p². At home the second one counts from p = 1 on: then a request whose weights have left is
late for certain, and below that the home is worth more than the room.
"""

from __future__ import annotations

from aegis.core.decision import Why
from aegis.core.ids import InstanceId, ModelId
from aegis.core.views import PPM, DecodeView, Pressure, Work
from aegis.core.wording import percent


def place(work: Work, lists: DecodeView, migrate_share: float) -> InstanceId:
    """The instance for a new request."""
    home = lists.home(work.model)
    if home is None:
        return _cheapest(work.model, lists).instance
    there = (s for s in lists.shares(work.model) if s.instance == home)
    joins = any(s.batches == 1 and s.room_tokens >= work.tokens for s in there)
    limit_ppm = migrate_share * PPM if joins else 0
    cost_ppm = lists.load_ppm(home) + _loads_ppm(work.model, lists, home)
    if cost_ppm - lists.by_pressure[0].load_ppm <= limit_ppm:
        return home  # none is under less pressure when the model comes to it
    best = _cheapest(work.model, lists, home)
    return home if cost_ppm - best.load_ppm <= limit_ppm else best.instance


def why(work: Work, lists: DecodeView, migrate_share: float, chosen: InstanceId) -> Why:
    """The reason for the instance that `place` has `chosen`."""
    home, pressed = lists.home(work.model), lists.by_pressure
    best = _cheapest(work.model, lists, home)
    if home is None:
        second = next((each for each in pressed if each.instance != best.instance), None)
        beside = f"; {second.instance}'s want {percent(second.load_ppm)}" if second else ""
        because = f"least pressed: its requests want {percent(best.load_ppm)} of its time{beside}"
        return Why(because, lost=second.instance if second else None)
    if home in (best.instance, pressed[0].instance) and chosen == home:
        return Why("home of its model, and least pressed", lost=None)
    share = next((share for share in lists.shares(work.model) if share.instance == home), None)
    gain_ppm = lists.load_ppm(home) + _loads_ppm(work.model, lists, home) - best.load_ppm
    if gain_ppm <= 0:
        return Why(f"home of its model; {best.instance} would have to load it", lost=best.instance)
    freer = f"{percent(gain_ppm)} freer"
    if share is None:
        limit = "nothing, and none are left at home"
    elif share.room_tokens < work.tokens:
        limit = "nothing, and there is no room in its batch at home"
    elif share.batches > 1:
        limit = f"nothing, and it has {share.batches} batches at home"
    else:
        limit = f"the {percent(round(migrate_share * PPM))} that a move needs"
    if chosen == home:
        return Why(f"home of its model; {best.instance} is {freer}, not more than {limit}", lost=best.instance)
    return Why(f"{freer} than its model's home {home}, more than {limit}", lost=home)


def _loads_ppm(model: ModelId, lists: DecodeView, instance: InstanceId) -> int:
    """What loads cost a first token at home: that of its weights, unless they are there, and that of others'."""
    there, fits = lists.weights(model, instance)
    return (2 - there - (fits or lists.reload_ppm(model) < PPM)) * _load_ppm(model, lists)


def _load_ppm(model: ModelId, lists: DecodeView) -> int:
    """A load takes a part of the TTFT, and with a chance of that part the first token is late by it."""
    part_ppm = lists.reload_ppm(model)
    return part_ppm * part_ppm // PPM


def _cheapest(model: ModelId, lists: DecodeView, home: InstanceId | None = None) -> Pressure:
    """Of the instances but the home the one under the least pressure when the model comes to it."""
    load_ppm, best = _load_ppm(model, lists), lists.by_pressure[0]
    best_ppm: int | None = None
    for each in lists.by_pressure:
        if best_ppm is not None and each.load_ppm >= best_ppm:
            break
        there, fits = lists.weights(model, each.instance)
        cost_ppm = each.load_ppm + (2 - there - fits) * load_ppm
        if each.instance != home and (best_ppm is None or cost_ppm < best_ppm):
            best, best_ppm = each, cost_ppm
    return best._replace(load_ppm=best.load_ppm if best_ppm is None else best_ppm)
