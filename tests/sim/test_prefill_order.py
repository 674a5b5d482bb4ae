"""Prefills in order of slack, under seeded chance: the laws are those of groups in order of making."""

from __future__ import annotations

import pytest

from aegis.sim.faults.world import Scenario
from prefill.policies.least_slack import LeastSlackPrefill
from tests.long_forms import first_of
from tests.sim.test_cores import LARGE_BLOCKS, SPECS, play

SLACK = LeastSlackPrefill()


def by_slack(**sizes: object) -> Scenario:
    given = {"specs": SPECS, "pages": 64, "host_slabs": 48, "requests": 60, "prefills": 2, "decodes": 2} | sizes
    return Scenario(prefill=SLACK, order=SLACK, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", first_of(1, range(4)))
def test_undisturbed(seed: int) -> None:
    ended = play(by_slack(gap_ns=500_000), seed).ended.values()
    assert {end.state for end in ended} <= {"finished", "cancelled"}


@pytest.mark.parametrize("seed", first_of(1, range(4)))
def test_instances_die_and_models_go(seed: int) -> None:
    play(by_slack(deaths=4, removals=3, jitter_ns=2_000_000), seed)


@pytest.mark.parametrize("seed", first_of(1, range(4)))
def test_the_engine_fails_now_and_then(seed: int) -> None:
    failed = [end for end in play(by_slack(failing_share=0.01), seed).ended.values() if end.state == "failed"]
    assert failed and all(end.message == "drawn" for end in failed)


@pytest.mark.parametrize("pages", first_of(1, [8, 12, 20]))
@pytest.mark.parametrize("seed", first_of(1, range(4)))
def test_instances_compete_for_the_last_pages(pages: int, seed: int) -> None:
    ended = play(by_slack(pages=pages, host_slabs=64, requests=30, prompt_max=60, output_max=30), seed).ended.values()
    assert {end.state for end in ended} <= {"finished", "cancelled"}


@pytest.mark.parametrize("seed", first_of(1, range(4)))
def test_instances_compete_for_the_last_host_slabs(seed: int) -> None:
    scenario = by_slack(specs=LARGE_BLOCKS[:3], host_slabs=16, gap_ns=500_000, prompt_max=60, output_max=20)
    play(scenario, seed)


@pytest.mark.parametrize("seed", first_of(1, range(6)))
def test_limits_move_while_serving(seed: int) -> None:
    world = play(by_slack(pages=40, host_slabs=64, moves=40, deaths=seed % 3, prompt_max=60, output_max=30), seed)
    assert all("memory limit" in ended.message for ended in world.ended.values() if ended.state == "failed")


def test_same_seed_same_log() -> None:
    scenario = by_slack(pages=32, host_slabs=32, deaths=2, removals=2)
    assert play(scenario, 5).log == play(scenario, 5).log
