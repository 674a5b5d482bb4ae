"""Adapters under seeded chance: each token is what its own adapter makes of KV that it made itself, whatever comes,
goes and dies meanwhile, and weights never leave under a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aegis.policies import Policy
from aegis.sim.faults.fake_models import make_adapter, make_spec
from aegis.sim.faults.world import Scenario
from tests.long_forms import first_of
from tests.sim.test_cores import play
from tests.sim.test_mixed import FEW, FEW_FIRST, LANES, POLICIES

BASES = tuple(make_spec(i, image_pages=3 + i, block_bytes=[65536, 131072, 98304][i]) for i in range(3))
SPECS = (
    *BASES,
    *[make_adapter(i, BASES[0], image_pages=1 + i % 2) for i in range(5)],
    *[make_adapter(i, BASES[1]) for i in range(5, 8)],
)
POLICIES_OF_ALL = {name: policy for name, policy in POLICIES.items() if "muxserve" not in name and "s-part" not in name}
_FEW_FIRST = [name for name in FEW_FIRST if name in POLICIES_OF_ALL]
each_policy = pytest.mark.parametrize(
    "policy", first_of(len(FEW), [POLICIES_OF_ALL[name] for name in _FEW_FIRST]), ids=_FEW_FIRST
)


def mixed(policy: Policy, **sizes: object) -> Scenario:
    given = {"specs": SPECS, "pages": 48, "host_slabs": 48, "requests": 60, "mixed": 2, "lane_shares": LANES} | sizes
    return Scenario(prefills=0, decodes=0, policy=policy, **given)  # type: ignore[arg-type]


@each_policy
@pytest.mark.parametrize("seed", first_of(1, range(6)))
def test_undisturbed(policy: Policy, seed: int) -> None:
    ended = play(mixed(policy), seed).ended.values()
    assert [end.message for end in ended if end.state == "failed"] == []


@each_policy
@pytest.mark.parametrize("seed", first_of(1, range(6)))
def test_models_come_and_go_and_instances_die(policy: Policy, seed: int) -> None:
    play(mixed(policy, deaths=3, removals=6, cache_extents=24, reuses=True), seed)


@each_policy
@pytest.mark.parametrize("seed", first_of(1, range(6)))
def test_little_memory(policy: Policy, seed: int) -> None:
    """A base, an adapter or two, and little KV."""
    play(mixed(policy, pages=11, host_slabs=12, requests=40, mixed=1, prompt_max=40, output_max=30), seed)


@pytest.mark.parametrize("seed", first_of(2, range(12)))
def test_split_pools(seed: int) -> None:
    scenario = Scenario(
        specs=SPECS, pages=24, host_slabs=32, requests=60, prefills=2, decodes=2, reuses=True, alike=3, cancel_share=0.2
    )
    play(scenario, seed)


def test_what_begins_alike_is_reused_by_the_same_adapter_only() -> None:
    """On the device, and from host memory after it was idle."""
    specs = (BASES[0], *[make_adapter(i, BASES[0]) for i in range(2)])
    scenario = mixed(POLICIES["aegaeon"], specs=specs, mixed=1, reuses=True, alike=1, requests=30)
    worlds = [play(replace(scenario, gap_ns=gap_ns), seed) for seed in range(3) for gap_ns in (2_000_000, 60_000_000)]
    assert sum(counters.reused_tokens for world in worlds for counters in world.decode_counters()) > 1000
    assert sum(world.memory.host.kept.counters.hits for world in worlds) > 0


def test_rows_of_adapters_are_one_batch() -> None:
    """However many adapters there are, they take no turns: there is one switch, to their base."""
    specs = (BASES[0], *[make_adapter(i, BASES[0]) for i in range(8)])
    world = play(mixed(POLICIES["aegaeon"], specs=specs, pages=64, mixed=1), 1)
    (counters,) = world.decode_counters()
    assert counters.switches == 1


@each_policy
@pytest.mark.parametrize(("pages", "instances"), [(6, 1), (8, 2)])
@pytest.mark.parametrize("seed", first_of(1, range(6)))
def test_adapters_that_do_not_fit_at_once(policy: Policy, pages: int, instances: int, seed: int) -> None:
    """In memory for their base, one or two of them, and KV of a few sequences: all of them would leave none for KV."""
    specs = (BASES[0], *[make_adapter(i, BASES[0]) for i in range(3)], BASES[1])
    play(mixed(policy, specs=specs, pages=pages, mixed=instances, requests=40, prompt_max=40, output_max=30), seed)


@each_policy
@pytest.mark.parametrize("seed", first_of(1, range(6)))
def test_an_adapter_does_not_take_the_room_that_is_made_for_a_larger_one(policy: Policy, seed: int) -> None:
    """The other instance gives its last page only if it is asked for no more than is lacking."""
    specs = (BASES[0], *[make_adapter(i, BASES[0], image_pages=1 + i % 2) for i in range(3)])
    play(mixed(policy, specs=specs, pages=6, requests=40, prompt_max=40, output_max=30), seed)
