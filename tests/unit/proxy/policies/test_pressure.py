"""Our placement: away from devices that have no time, to those that have, and never to and fro."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aegis.core.ids import InstanceId, ModelId
from proxy.policies.pressure import Pressure
from proxy.routing.placement_views import Change, InstanceView, ModelView, PlacedLoad, PlacementView

MEMORY = 1000
PPM = 1_000_000
POLICY = Pressure()


def load(model: str, steps_ppm: int, *, loads_ppm: int = 0, memory_ppm: int = 0) -> PlacedLoad:
    return PlacedLoad(ModelId(model), 1, 100, steps_ppm, loads_ppm, memory_ppm)


def instance(number: int, *loads: PlacedLoad, devices: tuple[int, ...] = ()) -> InstanceView:
    return InstanceView(InstanceId(f"mixed-{number}"), devices or (number,), MEMORY, loads)


def view_of(
    *instances: InstanceView, prefill_ppm: int = 0, places: dict[str, tuple[int, ...]] | None = None
) -> PlacementView:
    """Each model's places are where it is, unless they are said."""
    names: dict[ModelId, list[InstanceId]] = {}
    for each in instances:
        for placed in each.loads:
            names.setdefault(placed.model, []).append(each.instance)
    for model, numbers in (places or {}).items():
        names[ModelId(model)] = [InstanceId(f"mixed-{number}") for number in numbers]
    models = {name: ModelView(name, 10, 1, 10**8, 1.0, prefill_ppm, tuple(names[name])) for name in sorted(names)}
    return PlacementView({each.instance: each for each in instances}, models)


def changes(*instances: InstanceView, **how: object) -> list[Change]:
    return list(POLICY.changes(view_of(*instances, **how)))  # type: ignore[arg-type]


def test_the_model_moves_that_leaves_the_more_loaded_device_with_the_least() -> None:
    (change,) = changes(instance(0, load("a", 500_000), load("b", 400_000), load("c", 100_000)), instance(1))
    assert (change.model, change.places, change.source, change.moves) == ("a", ("mixed-1",), "mixed-0", True)
    assert change.gain_ppm == 500_000 and "100 %" in change.because and "50 %" in change.because


def test_nothing_moves_while_there_is_time() -> None:
    assert changes(instance(0, load("a", 500_000), load("b", 300_000)), instance(1)) == []


def test_nothing_moves_where_that_only_moves_the_pressure() -> None:
    assert changes(instance(0, load("a", 700_000), load("b", 200_000)), instance(1, load("c", 850_000))) == []


def test_loads_count_where_memory_does_not_hold_all() -> None:
    """Each model alone fits."""
    hot = instance(0, *[load(name, 300_000, loads_ppm=900_000, memory_ppm=700_000) for name in "ab"])
    (change,) = changes(hot, instance(1))
    assert change.model == "a"


def test_prompts_that_come_count_at_the_places_of_their_model() -> None:
    pair = instance(0, load("a", 450_000), load("b", 100_000))
    assert changes(pair, instance(1)) == []
    (change,) = changes(pair, instance(1), prefill_ppm=200_000)
    assert change.model == "a"


def test_a_device_that_instances_share_is_counted_once() -> None:
    shared = (instance(0, load("a", 500_000), devices=(7,)), instance(1, load("b", 400_000), devices=(7,)))
    assert changes(*shared) == [], "there is no other"
    (change,) = changes(*shared, instance(2))
    assert (change.source, change.places) == ("mixed-0", ("mixed-2",))


def test_of_a_group_of_ranks_the_most_loaded_device_counts() -> None:
    hot = instance(0, load("a", 500_000), load("b", 400_000))
    taken = instance(1, load("c", 600_000), devices=(1,))
    (change,) = changes(hot, taken, instance(2, devices=(2, 1)), instance(3, devices=(3, 4)))
    assert change.places == ("mixed-3",)


def test_nothing_moves_where_its_own_steps_are_what_a_model_wants() -> None:
    """It would want them anywhere."""
    assert changes(instance(0, load("a", 900_000)), instance(1)) == []
    (change,) = changes(
        instance(0, load("a", 1_900_000)), instance(1, load("b", 500_000), load("c", 400_000)), instance(2)
    )
    assert (change.model, change.places) == ("b", ("mixed-2",)), "the most loaded device that a move relieves"


def test_weights_that_hardly_fit_count_whole() -> None:
    """Of the loads it takes, a hundredth of memory that is lacking would be a hundredth."""
    each = [load(name, 100_000, loads_ppm=500_000, memory_ppm=340_000) for name in "abc"]
    (change,) = changes(instance(0, *each), instance(1, load("d", 300_000)))
    lacking_ppm = 1_500_000 * 20_000 // 1_020_000
    assert change.gain_ppm == (300_000 + lacking_ppm + 500_000) - 400_000


def test_one_of_several_places_moves_alone() -> None:
    hot = instance(1, load("a", 500_000), load("b", 450_000))
    (change,) = changes(instance(0, load("a", 500_000)), hot, instance(2))
    assert (change.model, change.places) == ("a", ("mixed-2", "mixed-0")) and change.source == "mixed-1"


def test_a_single_device_has_nowhere_to_go() -> None:
    assert changes(instance(0, load("a", 900_000), load("b", 900_000))) == []


WANTS = st.tuples(st.integers(0, 900_000), st.sampled_from([0, 30_000, 900_000]), st.sampled_from([0, 300_000]))
POOLS = st.lists(st.lists(WANTS, max_size=5), min_size=2, max_size=5)


def wanted_of(models: list[tuple[int, int, int]]) -> int:
    """The load of a device, summed anew."""
    steps, loads, memory = (sum(each) for each in zip(*models, strict=True)) if models else (0, 0, 0)
    if memory <= PPM:
        return steps
    return steps + min(loads * (memory - PPM) // memory + max(load for _, load, _ in models), loads)


@given(POOLS)
def test_moves_come_to_an_end_and_none_makes_the_worse_of_two_worse(pool: list[list[tuple[int, int, int]]]) -> None:
    """P1, under loads that are the same wherever a model is."""
    at = {f"m{d}-{n}": d for d, loads in enumerate(pool) for n in range(len(loads))}
    wants = {f"m{d}-{n}": each for d, loads in enumerate(pool) for n, each in enumerate(loads)}

    def on(device: int) -> int:
        return wanted_of([each for model, each in wants.items() if at[model] == device])

    for _ in range(1000):
        now = [
            instance(d, *[load(m, s, loads_ppm=w, memory_ppm=f) for m, (s, w, f) in wants.items() if at[m] == d])
            for d in range(len(pool))
        ]
        wanted = changes(*now)
        if not wanted:
            return
        source, target = at[wanted[0].model], int(wanted[0].places[0][-1])
        before = on(source)
        at[wanted[0].model] = target
        worse = max(on(source), on(target))
        assert before > worse and wanted[0].gain_ppm == before - worse
    raise AssertionError("it goes on for ever")
