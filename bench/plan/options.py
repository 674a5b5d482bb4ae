"""From the options of `aegis plan` to the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aegis.core.errors import UserError
from aegis.policies import recipe
from bench.common import result_files
from bench.plan.search import Question, plan
from bench.plan.show import show
from bench.simulate.cells.suites import OURS
from bench.simulate.options import chosen
from bench.simulate.setting import Setting, check_asked, tell_uncosted
from bench.simulate.workers import cores

_SEEDS = 3


def run(given: Mapping[str, Any]) -> None:
    """Raises UserError."""
    if given["json"]:
        result_files.check(given["json"])
    asked = question(given)
    for seed in asked.seeds:
        check_asked(replace(asked.setting, seed=seed))
    tell_uncosted(asked.setting)
    answer = plan(asked)
    show(answer)
    if given["json"]:
        result_files.write_json(given["json"], answer)


def question(given: Mapping[str, Any]) -> Question:
    """Raises UserError."""
    workload, trace = given["workload"], given["trace"]
    if (workload is None) == (trace is None):
        raise UserError("give one of --workload and --trace")
    if trace and given["seeds"]:
        raise UserError("--seeds is of --workload; a trace is drawn already")
    policies = tuple(dict.fromkeys(recipe(name).name for name in given["policy"] or (OURS,)))
    seeds = 1 if trace else given["seeds"] or _SEEDS
    setting = Setting(policy=policies[0], workload=workload, trace=str(trace) if trace else None, **chosen(given))
    return Question(
        setting=setting,
        policies=policies,
        seeds=tuple(range(given["seed"], given["seed"] + seeds)),
        most=given["most"],
        jobs=given["jobs"] or cores(),
    )
