"""The cores under seeded chance: no token wrong, lost or doubled, no law broken, nobody waits for ever."""

from __future__ import annotations

import pytest

from aegis.sim.faults.fake_models import PAGE, make_spec
from aegis.sim.faults.seed_runs import run_to_end
from aegis.sim.faults.world import Scenario, World
from tests.long_forms import first_of

SPECS = tuple(make_spec(i, image_pages=3 + i % 3, block_bytes=[65536, 131072, 98304, 262144][i % 4]) for i in range(8))
LARGE_BLOCKS = tuple(
    make_spec(i, image_pages=3 + i % 3, block_bytes=[PAGE // 2, PAGE, PAGE // 3 // 128 * 128, PAGE // 8][i % 4])
    for i in range(8)
)


def play(scenario: Scenario, seed: int) -> World:
    world = World(scenario, seed)
    run_to_end(world)
    return world


@pytest.mark.parametrize("seed", first_of(1, range(8)))
def test_two_of_eight_models_fit(seed: int) -> None:
    (counters,) = play(Scenario(specs=SPECS, pages=32, host_slabs=64, requests=64), seed).decode_counters()
    assert counters.switches >= 20 and counters.preemptions >= 20 and counters.prefetches > 0


def test_little_device_memory() -> None:
    """KV has to leave the device, and comes back."""
    scenario = Scenario(specs=SPECS, pages=20, host_slabs=8, requests=50, gap_ns=200_000, prompt_max=60, output_max=40)
    assert sum(play(scenario, seed).decode_counters()[0].swap_out_bytes > 0 for seed in range(6)) >= 3


def test_little_memory_anywhere() -> None:
    """At times the KV that has to leave the device finds no room in the host either, and is computed again."""
    scenario = Scenario(
        specs=LARGE_BLOCKS, pages=32, host_slabs=9, requests=40, gap_ns=200_000, prompt_max=80, output_max=20
    )
    assert all(play(scenario, seed).decode_counters()[0].given_up > 0 for seed in range(4))


@pytest.mark.parametrize("seed", first_of(1, range(4)))
def test_the_engine_fails_now_and_then(seed: int) -> None:
    """Only the sequences in the step are told of it, and no memory is lost."""
    scenario = Scenario(specs=SPECS, pages=64, host_slabs=48, prefills=2, decodes=2, requests=60, failing_share=0.01)
    failed = [ended for ended in play(scenario, seed).ended.values() if ended.state == "failed"]
    assert failed and all(ended.message == "drawn" for ended in failed)


@pytest.mark.parametrize("prefills", [2, 3])
@pytest.mark.parametrize("seed", first_of(2, range(4)))
def test_instances_compete_for_the_last_host_slabs(prefills: int, seed: int) -> None:
    """Requests that need nearly all the slabs there are, on every instance: nobody may hold a part and wait."""
    scenario = Scenario(
        specs=tuple(make_spec(i, image_pages=3, block_bytes=PAGE) for i in range(3)),
        pages=64,
        host_slabs=10,
        prefills=prefills,
        decodes=4 - prefills,
        requests=60,
        gap_ns=200_000,
        prompt_max=108,
        output_max=4,
    )
    play(scenario, seed)


@pytest.mark.parametrize("seed", first_of(1, range(16)))
def test_instances_die(seed: int) -> None:
    play(Scenario(specs=SPECS, pages=64, host_slabs=48, prefills=2, decodes=2, requests=60, deaths=4), seed)


@pytest.mark.parametrize("seed", first_of(2, range(6)))
def test_instances_die_when_there_is_little_memory(seed: int) -> None:
    scenario = Scenario(
        specs=LARGE_BLOCKS,
        pages=64,
        host_slabs=12,
        prefills=2,
        decodes=2,
        requests=40,
        deaths=8,
        gap_ns=500_000,
        jitter_ns=5_000_000,
        prompt_max=80,
        output_max=20,
    )
    play(scenario, seed)


@pytest.mark.parametrize("seed", first_of(1, range(6)))
def test_models_leave_and_come_back(seed: int) -> None:
    scenario = Scenario(
        specs=SPECS,
        pages=64,
        host_slabs=48,
        prefills=2,
        decodes=2,
        requests=60,
        removals=6,
        deaths=2,
        jitter_ns=2_000_000,
    )
    world = play(scenario, seed)
    assert world.readded == scenario.removals
    assert any("was removed" in ended.message for ended in world.ended.values())


@pytest.mark.parametrize("pages", [8, 12, 20])
@pytest.mark.parametrize("seed", first_of(1, range(6)))
def test_instances_compete_for_the_last_pages(pages: int, seed: int) -> None:
    """A device that hardly holds one model and its KV, for four instances: one runs, the others wait, nobody fails."""
    scenario = Scenario(
        specs=SPECS, pages=pages, host_slabs=64, prefills=2, decodes=2, requests=30, prompt_max=60, output_max=30
    )
    ended = play(scenario, seed).ended.values()
    assert {end.state for end in ended} <= {"finished", "cancelled"}


@pytest.mark.parametrize("seed", first_of(1, range(3)))
def test_who_waits_for_host_slabs_hoards_no_pages(seed: int) -> None:
    """The decode instance needs the pages on which the prefill instance waits for host slabs that it is to free."""
    scenario = Scenario(
        specs=LARGE_BLOCKS[:2],
        pages=12,
        host_slabs=8,
        requests=30,
        gap_ns=500_000,
        prompt_max=60,
        output_max=20,
        patience_ns=5_000_000,
    )
    assert {ended.state for ended in play(scenario, seed).ended.values()} <= {"finished", "cancelled"}


@pytest.mark.parametrize("seed", first_of(1, range(12)))
def test_limits_move_while_serving(seed: int) -> None:
    """Every command is answered once; requests end only where a limit forbids what they need."""
    scenario = Scenario(
        specs=SPECS,
        pages=40,
        host_slabs=64,
        prefills=2,
        decodes=2,
        requests=60,
        moves=40,
        deaths=seed % 3,
        prompt_max=60,
        output_max=30,
    )
    world = play(scenario, seed)
    assert all("memory limit" in ended.message for ended in world.ended.values() if ended.state == "failed")
    assert any(settled.pages for settled in world.settled.values())


@pytest.mark.parametrize("seed", first_of(2, range(4)))
def test_a_pool_of_one_model(seed: int) -> None:
    play(Scenario(specs=SPECS[:1], pages=16, host_slabs=16, requests=60, gap_ns=300_000), seed)


def test_same_seed_same_log() -> None:
    scenario = Scenario(specs=SPECS, pages=32, host_slabs=32, requests=30, deaths=2, removals=2)
    assert play(scenario, 5).log == play(scenario, 5).log
    assert play(scenario, 5).log != play(scenario, 6).log
