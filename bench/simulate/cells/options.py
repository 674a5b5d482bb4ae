"""From the options of `aegis simulate --suite cells` and the like to what is searched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aegis.core.errors import UserError
from aegis.policies import recipe
from bench.simulate.cells.run import Choice, run
from bench.simulate.cells.suites import CELL_SUITES, CellSuite, gpus
from bench.simulate.setting import Setting
from bench.simulate.workers import cores

OF_A_SEARCH = ("seeds", "only", "again")
_NOT_OF_A_SEARCH = ("prefill", "decode", "mixed", "roles", "sweep", "records", "spans", "as_published", "trace_dir")
_NOT_OF_CELLS = ("workload", "trace", "gpu", "models", "slo", "give_up", "costs", "link", "switch")
_SEEDS = 3


def search(name: str, given: Mapping[str, Any], chosen: Mapping[str, Any]) -> None:
    """`chosen`: what was said of a setting. Raises UserError."""
    unused = _NOT_OF_A_SEARCH if name == "gpus" else _NOT_OF_A_SEARCH + _NOT_OF_CELLS
    for each in unused:
        if is_given(given[each]):
            raise UserError(f"--{each.replace('_', '-')} is not of --suite {name}, which sets it itself")
    suite = _gpus(given, chosen) if name == "gpus" else CELL_SUITES[name](tiny=given["tiny"])
    seeds = 1 if given["trace"] else given["seeds"] or _SEEDS
    choice = Choice(
        seeds=tuple(range(given["seed"], given["seed"] + seeds)),
        policies=tuple(recipe(each).name for each in given["policy"] or ()),
        only=tuple(given["only"] or ()),
        again=given["again"],
        jobs=given["jobs"] or cores(),
    )
    run(suite, choice, json=given["json"] or Path(f"{name}.json"), plot=given["plot"] or Path(f"{name}.png"))


def is_given(value: object) -> bool:
    """0 is."""
    return value is not None and value is not False


def _gpus(given: Mapping[str, Any], chosen: Mapping[str, Any]) -> CellSuite:
    workload, trace = given["workload"], given["trace"]
    if (workload is None) == (trace is None):
        raise UserError("--suite gpus needs one of --trace and --workload")
    setting = Setting(policy="", workload=workload, trace=str(trace) if trace else None, **chosen)
    return gpus(setting, workload or trace.name, tiny=given["tiny"])
