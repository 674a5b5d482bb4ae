"""`aegis simulate --faults`: seeds of faulty markets through the cores that decide; each has to keep every law."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from aegis.core.errors import UserError
from aegis.sim.faults.plan import EVERY, Kind, kinds_of
from aegis.sim.faults.play import Broken, broken
from bench.simulate.workers import cores, each

_CHUNK = 25
_SEEDS = 200
_OURS = ("faults", "fault", "seed", "seeds", "jobs", "last")


def run(given: Mapping[str, Any]) -> int:
    """The exit status: 1 where a seed broke a law. Raises UserError."""
    for name, value in given.items():
        if name not in _OURS and value is not None and value is not False:
            raise UserError(f"--{name.replace('_', '-')} is not of --faults, whose markets are drawn from their seeds")
    kinds = kinds_of(given["fault"]) if given["fault"] else EVERY
    first, count = given["seed"], given["seeds"] or _SEEDS
    chunks = [range(at, min(at + _CHUNK, first + count)) for at in range(first, first + count, _CHUNK)]
    work = partial(broken, kinds=kinds, events=given["last"] or 0)
    found = [one for some in each(work, chunks, jobs=given["jobs"] or cores(), title="playing") for one in some]
    for one in found:
        print(_report(one, kinds))
    print(f"{count} seeds, {len(found)} of them broke a law")
    return int(bool(found))


def _report(one: Broken, kinds: frozenset[Kind]) -> str:
    only = "" if kinds == EVERY else "".join(f" --fault {kind}" for kind in sorted(kinds))
    events = "".join(f"  {event}\n" for event in one.events)
    command = f"aegis simulate --faults{only} --seed {one.seed} --seeds 1"
    return f"{events}{command}   # {one.setup}; {one.faults}; {one.problem}"
