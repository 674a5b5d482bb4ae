"""Prism's Algorithm 1: models in the order of their KV's growth, each to the device under the least KV pressure."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aegis.core.ids import InstanceId, ModelId
from proxy.policies.kvpr import KvPressureRatio
from proxy.routing.placement_views import InstanceView, ModelView, PlacementView

MEMORY = 1000
TBT_NS = 10**8


def instance(number: int, *devices: int, memory: int = MEMORY) -> InstanceView:
    return InstanceView(InstanceId(f"mixed-{number}"), devices or (number,), memory, ())


def model(number: int, rate: float, *, weights: int = 100, home: int | None = None, tbt_ns: int = TBT_NS) -> ModelView:
    places = () if home is None else (InstanceId(f"mixed-{home}"),)
    return ModelView(ModelId(f"m{number}"), weights, 1, tbt_ns, rate, 0, places)


def placed(instances: list[InstanceView], models: list[ModelView], threshold: float = 0.1) -> dict[str, str]:
    view = PlacementView({each.instance: each for each in instances}, {each.model: each for each in models})
    return {c.model: c.places[0] for c in KvPressureRatio(threshold=threshold).changes(view)}


def test_the_hungriest_come_first_and_are_apart() -> None:
    models = [model(0, 1.0), model(1, 9.0), model(2, 8.0), model(3, 2.0)]
    assert placed([instance(0), instance(1)], models) == {
        "m1": "mixed-0",
        "m2": "mixed-1",
        "m3": "mixed-1",
        "m0": "mixed-0",
    }


def test_a_rate_weighs_by_its_deadline() -> None:
    """9 tokens per 100 ms are less than 5 per 10 ms."""
    models = [model(0, 9.0), model(1, 5.0, tbt_ns=TBT_NS // 10)]
    assert placed([instance(0), instance(1)], models) == {"m1": "mixed-0", "m0": "mixed-1"}


def test_who_is_hardly_worse_off_stays() -> None:
    """The first one makes the difference: the second's home is as good as free, or pressed by it."""
    pool = [instance(0), instance(1)]
    assert placed(pool, [model(0, 9.0, home=1), model(1, 8.0, home=0)]) == {}
    assert placed(pool, [model(0, 9.0, home=0), model(1, 8.0, home=0)]) == {"m1": "mixed-1"}
    assert placed(pool, [model(0, 9.0, home=0), model(1, 8.0, home=1), model(2, 7.9, home=0)], 0.99) == {}


def test_a_small_part_of_the_ratio_of_the_whole_pool_moves_nobody() -> None:
    """Though a device without any load is better by all that there is here."""
    pool = [instance(0), instance(1), instance(2)]
    models = [model(0, 9.0, home=1), model(1, 0.2, home=0), model(2, 0.1, home=0)]
    assert placed(pool, models, 0.1) == {}
    assert placed(pool, models, 0.01) == {"m2": "mixed-2"}


def test_models_that_nobody_asks_for_stay_where_they_are() -> None:
    assert placed([instance(0)], [model(0, 0.0)]) == {}


def test_a_device_without_room_for_the_weights_is_the_last_to_be_chosen() -> None:
    assert placed([instance(0, memory=90), instance(1)], [model(0, 1.0), model(1, 1.0)]) == {
        "m0": "mixed-1",
        "m1": "mixed-1",
    }


def test_a_device_that_instances_share_is_counted_once() -> None:
    """What the first model takes of it, it takes of both instances there."""
    models = [model(0, 9.0), model(1, 8.0)]
    assert placed([instance(0, 7), instance(1, 7), instance(2, 8)], models) == {"m0": "mixed-0", "m1": "mixed-2"}


def test_of_a_group_of_ranks_the_most_pressed_device_counts() -> None:
    models = [model(0, 9.0, home=0), model(1, 8.0)]
    assert placed([instance(0, 0), instance(1, 0, 1), instance(2, 2, 3)], models) == {"m1": "mixed-2"}


RATES = st.lists(st.integers(1, 1000), min_size=1, max_size=12)


@given(RATES, st.integers(1, 4), st.data())
def test_groups_of_ranks_are_placed_on_like_devices(rates: list[int], count: int, data: st.DataObject) -> None:
    """Each rank has as much of everything as the device of an instance without others."""
    places = data.draw(st.lists(st.integers(0, count - 1), min_size=len(rates), max_size=len(rates)))
    models = [model(n, r, weights=50, home=home) for n, (r, home) in enumerate(zip(rates, places, strict=True))]
    groups = [instance(n, 2 * n, 2 * n + 1) for n in range(count)]
    assert placed(groups, models, 0.5) == placed([instance(n) for n in range(count)], models, 0.5)


@given(RATES, st.integers(1, 5), st.data())
def test_placing_again_under_the_same_loads_changes_nothing(rates: list[int], count: int, data: st.DataObject) -> None:
    """With a threshold, which keeps equals apart."""
    places = data.draw(st.lists(st.integers(0, count - 1), min_size=len(rates), max_size=len(rates)))
    pool = [instance(number) for number in range(count)]
    models = {
        f"m{n}": model(n, float(rate), weights=10, home=home)
        for n, (rate, home) in enumerate(zip(rates, places, strict=True))
    }
    for _ in range(3):
        changes = placed(pool, list(models.values()))
        for name, home in changes.items():
            models[name] = model(int(name[1:]), models[name].tokens_per_s, weights=10, home=int(home[-1]))
    assert placed(pool, list(models.values())) == {}
