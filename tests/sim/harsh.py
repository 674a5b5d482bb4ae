"""Harsh scenarios, each drawn from one seed, where nobody may starve under `least-slack`."""

from __future__ import annotations

from dataclasses import replace

from aegis.sim.faults import random_scenarios
from aegis.sim.faults.random_scenarios import Setup
from aegis.sim.faults.scenario import Scenario
from tests.sim.starvation import WatchedDecodeCore, WatchedPrefillCore


def scenario_of(seed: int) -> tuple[Setup, Scenario]:
    """The scenario of a seed."""
    setup, scenario = random_scenarios.scenario_of(seed)
    if setup.recipe.name.startswith("least-slack"):
        scenario = replace(scenario, decode_core=WatchedDecodeCore, prefill_core=WatchedPrefillCore)
    return setup, scenario
