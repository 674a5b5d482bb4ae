"""Our placement: away from devices that have no time, to those that have, and never to and fro."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from aegis.core.ids import InstanceId, ModelId
from aegis.core.views import PPM
from proxy.policies.pressure import Pressure
from proxy.routing.placement_views import Change, InstanceView, ModelView, PlacedLoad, PlacementView

MEMORY = 1000
POLICY = Pressure()


def load(
    model: str, steps_ppm: int, *, loads_ppm: int = 0, memory_ppm: int = 0, requests: int = 1, tokens: int = 100
) -> PlacedLoad:
    return PlacedLoad(ModelId(model), requests, tokens, steps_ppm, loads_ppm, memory_ppm)


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


def grown(requests: int, *, tokens: int = 100, steps_ppm: int = 100_000, largest: int = 0) -> PlacedLoad:
    """Weights take 10 of 100 bytes of memory, KV a byte for each token."""
    memory_ppm, largest = (10 + tokens) * PPM // 100, largest or tokens // requests
    return load("a", steps_ppm, memory_ppm=memory_ppm, requests=requests, tokens=tokens)._replace(
        largest_tokens=largest
    )


def test_requests_that_lack_room_go_where_there_is_some() -> None:
    (change,) = changes(instance(0, grown(5)), instance(1, load("b", 300_000)), instance(2))
    assert (change.model, change.source, change.places, change.moves) == ("a", "mixed-0", ("mixed-2", "mixed-0"), True)
    assert change.share_ppm == 100_000 and change.gain_ppm is None, "10 of its 100 tokens"
    assert "lacks 10 % of the memory" in change.because


def test_tokens_that_were_made_count_and_not_those_that_were_due() -> None:
    assert changes(instance(0, grown(5)._replace(ahead_tokens=-10)), instance(1)) == [], "90 of 100 bytes"
    source = instance(0, grown(4, tokens=80, largest=30)._replace(ahead_tokens=40))
    (change,) = changes(source, instance(1))
    assert change.share_ppm == 250_000, "30 of 120 tokens"
    assert changes(source, instance(1, grown(2, tokens=10)._replace(ahead_tokens=20))) != []
    assert changes(source, instance(1, grown(2, tokens=10)._replace(ahead_tokens=21))) == []


def test_that_comes_before_moves_for_time() -> None:
    hot = instance(1, load("b", 500_000), load("c", 400_000))
    assert [change.model for change in changes(instance(0, grown(5)), hot, instance(2))] == ["a"]


def test_a_request_that_is_alone_would_lack_room_anywhere() -> None:
    assert changes(instance(0, grown(1)), instance(1)) == []


def test_requests_of_a_model_without_kv_lack_no_room_however_many_there_are() -> None:
    """Texts that are to be embedded count by their blocks, which hold nothing."""
    view = view_of(instance(0, grown(5)), instance(1))
    embeds = {name: replace(model, token_bytes=0) for name, model in view.models.items()}
    assert POLICY.changes(replace(view, models=embeds)) == []


def test_where_several_proxies_have_requests_they_stay() -> None:
    """Each would have whole ones leave, and together more than lack room: they would come back."""
    assert changes(instance(0, grown(5)._replace(largest_tokens=0)), instance(1)) == []


def test_they_stay_where_nobody_has_room_and_time() -> None:
    source = instance(0, grown(5))
    assert changes(source, instance(1, load("b", 750_000))) == [], "with its steps there would be too little time"
    assert changes(source, instance(1, load("b", 650_000))) != []
    assert changes(source, instance(1, devices=(0,))) == [], "it is the same device"
    assert changes(instance(0, grown(2, tokens=190)), instance(1)) == [], "a whole request of 95 does not fit beside 10"


def test_where_the_model_is_its_weights_need_no_room() -> None:
    def to(tokens: int) -> list[Change]:
        return changes(instance(0, grown(5)), instance(1, grown(1, tokens=tokens, steps_ppm=780_000)))

    (change,) = to(60)
    assert change.places == ("mixed-1", "mixed-0"), "and of its steps a tenth is added"
    assert to(61) == [], "10 lack room, and of whole ones up to 20 more may go"


@given(st.lists(st.lists(st.integers(1, 60), max_size=12), min_size=2, max_size=5))
def test_moves_of_what_lacks_room_come_to_an_end(pool: list[list[int]]) -> None:
    """P2, of one model, for the tokens that each of its requests has on each instance."""
    at = [list(requests) for requests in pool]

    def on(device: int) -> list[PlacedLoad]:
        requests = at[device]
        return [grown(len(requests), tokens=sum(requests), largest=max(requests))] if requests else []

    for _ in range(100):
        wanted = changes(*[instance(device, *on(device)) for device in range(len(at))])
        if not wanted:
            return
        source, target = int(wanted[0].source[-1]), int(wanted[0].places[0][-1])  # type: ignore[index]
        tokens, moved = sum(at[source]), 0
        while moved * PPM < tokens * wanted[0].share_ppm:
            moved += at[source][-1]
            at[target].append(at[source].pop())
        assert sum(at[source]) <= 90 and sum(at[target]) <= 90, "all have room"
    raise AssertionError("it goes on for ever")


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
