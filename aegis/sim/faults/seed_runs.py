"""Runs seeds of faulty scenarios: each either keeps every law, or is reported as broken."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aegis.sim.faults.fault_injection import FaultInjector
from aegis.sim.faults.laws import check_end
from aegis.sim.faults.plan import EVERY, Kind
from aegis.sim.faults.random_scenarios import faulty_scenario_of
from aegis.sim.faults.world import World


@dataclass(frozen=True, slots=True)
class BrokenSeed:
    """A seed that broke a law. `events` are what happened last."""

    seed: int
    setup: str
    faults: str
    problem: str
    events: tuple[str, ...]


def run_seed(seed: int, kinds: frozenset[Kind] = EVERY) -> World:
    """Raises what the core, or the law, that fails raises."""
    world = World(faulty_scenario_of(seed, kinds)[1], seed)
    run_to_end(world)
    return world


def run_to_end(world: World) -> None:
    """A scenario from its beginning to its end. Raises what the core, or the law, that fails raises."""
    FaultInjector(world).schedule(world.schedule())
    world.run()
    check_end(world)


def broken_seeds(seeds: Iterable[int], kinds: frozenset[Kind] = EVERY, *, events: int = 0) -> list[BrokenSeed]:
    """The seeds that broke a law."""
    return [found for seed in seeds if (found := _broken_seed(seed, kinds, events))]


def _broken_seed(seed: int, kinds: frozenset[Kind], events: int) -> BrokenSeed | None:
    setup, scenario = faulty_scenario_of(seed, kinds)
    world = World(scenario, seed)
    try:
        run_to_end(world)
    except Exception as error:  # noqa: BLE001  # whatever is raised by a core under test is what is looked for
        at = traceback.extract_tb(error.__traceback__)[-1]
        problem = (f"{type(error).__name__}: {error}".splitlines() or [""])[0][:300]
        where = f"{Path(at.filename).parent.name}/{Path(at.filename).name}:{at.lineno}"
        last = tuple(world.log[-events:]) if events else ()
        return BrokenSeed(seed, str(setup), str(scenario.plan), f"{where} {problem}", last)
    return None
