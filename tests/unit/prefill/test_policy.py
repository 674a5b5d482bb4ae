"""Grouped first-come-first-served prefill (Aegaeon Algorithm 1)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aegis.core.estimators import Hardware, Latency
from aegis.core.ids import InstanceId, ModelId
from aegis.core.views import GroupView, PrefillPlacement, QueueView
from prefill.policy import GroupedFcfs, load_ns
from tests.sim.pretended import make_spec

SPECS = [make_spec(i, image_pages=pages, block_bytes=128) for i, pages in enumerate([1, 1, 40])]
SMALL, OTHER, LARGE = (spec.model for spec in SPECS)
LATENCY = {spec.model: Latency(spec.manifest, Hardware()) for spec in SPECS}
SWITCH_NS = {model: latency.switch_ns() for model, latency in LATENCY.items()}


def group(number: int, model: ModelId, *, size: int = 1, tokens: tuple[int, ...] = (10,)) -> GroupView:
    return GroupView(number, model, size, tokens)


def queue(name: str, *groups: GroupView, running: ModelId | None = None) -> QueueView:
    return QueueView(InstanceId(name), groups, running)


def place(model: ModelId, *queues: QueueView) -> PrefillPlacement:
    return GroupedFcfs().place(model, queues, LATENCY)


def test_a_group_of_the_same_model_with_room_comes_before_load() -> None:
    """Lines 5-8: even on the most loaded instance."""
    a = queue("a", group(1, LARGE), group(2, SMALL, size=7))
    assert place(SMALL, a, queue("b")) == PrefillPlacement(InstanceId("a"), 2)


def test_the_first_group_with_room_is_joined() -> None:
    a = queue("a", group(1, SMALL, size=8), group(2, OTHER), group(3, SMALL, size=3))
    b = queue("b", group(1, SMALL))
    assert place(SMALL, a, b) == PrefillPlacement(InstanceId("a"), 3)


def test_a_full_group_is_not_joined() -> None:
    """Line 6; its size is cumulative, so one job left of eight is as full as eight left."""
    full = queue("a", group(1, SMALL, size=8, tokens=(10,)))
    assert place(SMALL, full) == PrefillPlacement(InstanceId("a"), None)
    assert GroupedFcfs(max_group_size=9).place(SMALL, [full], LATENCY).group == 1


def test_a_new_group_goes_to_the_least_load() -> None:
    """Lines 9-13: load is time, not a number of groups or jobs."""
    a = queue("a", group(1, LARGE))
    b = queue("b", group(1, OTHER), group(2, LARGE, tokens=()), group(3, OTHER))
    c = queue("c", *(group(i, OTHER, tokens=(1, 1)) for i in range(5)), running=OTHER)
    loads = [load_ns(q, LATENCY) for q in (c, a, b)]
    assert loads == sorted(set(loads))
    assert place(SMALL, a, b, c) == PrefillPlacement(InstanceId("c"), None)


def test_equal_loads_are_told_apart_by_id() -> None:
    assert place(SMALL, queue("a"), queue("b")).instance == "a"
    same = (group(1, OTHER),)
    assert place(SMALL, queue("a", *same), queue("b", *same)).instance == "a"


def test_load_counts_execution_and_every_switch() -> None:
    """Eq. 4 and 5: the running model needs no switch, a model that comes back does."""
    run = LATENCY[SMALL].prefill_ns(10)
    assert load_ns(queue("a"), LATENCY) == 0
    assert load_ns(queue("a", group(1, SMALL), running=SMALL), LATENCY) == run
    assert load_ns(queue("a", group(1, SMALL)), LATENCY) == run + SWITCH_NS[SMALL]
    back = queue("a", group(1, SMALL), group(2, LARGE, tokens=()), group(3, SMALL, tokens=(10, 10)), running=SMALL)
    assert load_ns(back, LATENCY) == 3 * run + SWITCH_NS[LARGE] + SWITCH_NS[SMALL]
    two_groups = queue("a", group(1, SMALL), group(2, SMALL))
    assert load_ns(two_groups, LATENCY) == 2 * run + SWITCH_NS[SMALL]


groups = st.builds(
    GroupView,
    st.integers(0, 99),
    st.sampled_from([SMALL, OTHER, LARGE]),
    st.integers(1, 8),
    st.lists(st.integers(1, 500), max_size=8).map(tuple),
)


@given(
    st.lists(st.lists(groups, max_size=5), min_size=1, max_size=4),
    st.sampled_from([SMALL, OTHER, LARGE]),
    st.integers(1, 8),
)
def test_as_algorithm_1_is_written(lists: list[list[GroupView]], model: ModelId, max_group_size: int) -> None:
    queues = [queue(f"i{index}", *held) for index, held in enumerate(lists)]

    def algorithm_1() -> PrefillPlacement:
        min_load, best = float("inf"), queues[0]
        for i in queues:
            for g in i.groups:
                if g.model == model and g.size < max_group_size:
                    return PrefillPlacement(i.instance, g.group)
            load = load_ns(i, LATENCY)
            if load < min_load:
                min_load, best = load, i
        return PrefillPlacement(best.instance, None)

    assert GroupedFcfs(max_group_size).place(model, queues, LATENCY) == algorithm_1()
