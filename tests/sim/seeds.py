"""Plays harsh scenarios seed after seed: `python -m tests.sim.seeds --seeds 10000`.

A seed that breaks a law is named with the command that plays it again.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from time import monotonic

from aegis.sim.faults.seed_runs import run_to_end
from aegis.sim.faults.world import World
from tests.sim.harsh import scenario_of

_CHUNK = 25


def run_seed(seed: int) -> World:
    """Raises AssertionError if a law does not hold."""
    _, scenario = scenario_of(seed)
    world = World(scenario, seed)
    run_to_end(world)
    return world


def failures(seeds: Iterable[int]) -> list[str]:
    """The seeds that broke a law, each with the command that plays it again."""
    return [report for seed in seeds if (report := _failure(seed))]


def _failure(seed: int) -> str:
    try:
        run_seed(seed)
    except Exception as error:  # noqa: BLE001  # whatever is raised by a core under test is what is looked for
        at = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        setup, _ = scenario_of(seed)
        return f"python -m tests.sim.seeds --seed {seed}   # {setup}; {at.filename}:{at.lineno} {problem}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.seeds", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="from this one on (%(default)s)")
    parser.add_argument("--jobs", type=int, default=None, help="processes (one per core)")
    parser.add_argument("--seed", type=int, help="play this one alone, and raise what it raises")
    options = parser.parse_args()
    if options.seed is not None:
        run_seed(options.seed)
        return 0
    started_s, stop = monotonic(), options.first + options.seeds
    chunks = [range(at, min(at + _CHUNK, stop)) for at in range(options.first, stop, _CHUNK)]
    failed = 0
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as workers:
        for reports in workers.map(failures, chunks):
            failed += len(reports)
            for report in reports:
                sys.stdout.write(f"{report}\n")
    sys.stdout.write(f"{options.seeds} seeds, {failed} of them broke a law; {monotonic() - started_s:.0f} s\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
