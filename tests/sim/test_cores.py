"""The cores under seeded chance: no token wrong, lost or doubled, no law broken, nobody waits for ever."""

from __future__ import annotations

import pytest

from tests.sim.world import Scenario, World, make_spec

SPECS = tuple(
    make_spec(i, image_pages=3 + i % 3, block_bytes=[65536, 131072, 98304 // 64 * 64, 262144][i % 4]) for i in range(8)
)


def play(scenario: Scenario, seed: int) -> World:
    world = World(scenario, seed)
    world.run()
    world.check_end()
    return world


@pytest.mark.parametrize("seed", range(10))
def test_two_of_eight_models_fit(seed: int) -> None:
    world = play(Scenario(specs=SPECS, pages=16, host_slabs=64, requests=64), seed)
    counters = world.nodes["decode-0"].core.counters  # type: ignore[index]
    assert counters.switches >= 20 and counters.preemptions >= 20 and counters.prefetches > 0


@pytest.mark.parametrize("seed", range(10))
def test_little_memory_anywhere(seed: int) -> None:
    """KV has to leave the device, and at times finds no room in the host either."""
    scenario = Scenario(specs=SPECS, pages=12, host_slabs=8, requests=50, gap_ns=200_000, prompt_max=60, output_max=40)
    play(scenario, seed)


@pytest.mark.parametrize("seed", range(20))
def test_instances_die(seed: int) -> None:
    play(Scenario(specs=SPECS, pages=16, host_slabs=48, prefills=2, decodes=2, requests=60, deaths=4), seed)


@pytest.mark.parametrize("seed", range(10))
def test_a_pool_of_one_model(seed: int) -> None:
    play(Scenario(specs=SPECS[:1], pages=8, host_slabs=16, requests=60, gap_ns=300_000), seed)


def test_same_seed_same_log() -> None:
    scenario = Scenario(specs=SPECS, pages=16, host_slabs=32, requests=40, deaths=2)
    assert play(scenario, 5).log == play(scenario, 5).log
    assert play(scenario, 5).log != play(scenario, 6).log
