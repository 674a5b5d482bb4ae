"""`aegis plan` from its options to a sentence and a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
from rich.table import Table

from aegis.core.clock import NS_PER_S
from aegis.core.errors import UserError
from aegis.core.wording import count
from aegis.policies import recipe
from bench.common import result_files
from bench.common.numbers import percent, seconds, size
from bench.plan.load_curve import load_curve, parse_loads
from bench.plan.load_table import draw, load_sentence, load_table
from bench.plan.search import Need, Plan, PlanSettings, plan
from bench.simulate import plot_files, table
from bench.simulate.cells.search import Probe, end_of
from bench.simulate.contenders import APART, OURS
from bench.simulate.options import chosen
from bench.simulate.setting import Setting, check_asked, tell_uncosted
from bench.simulate.workers import cores

_SEEDS = 3
_TITLES = ("GPUs", "of each seed", "first tokens", "tokens", "with one less", "", "computing", "link", "TTFT p99")


def run(given: Mapping[str, Any]) -> None:
    """Raises UserError."""
    result_files.check_all(given[name] for name in ("json", "plot") if given[name])
    if given["plot"]:
        plot_files.check(given["plot"])
    settings, loads = settings_of(given), parse_loads(given["loads"])
    if given["plot"] and not loads:
        raise UserError("--plot draws what --loads names; leave out --loads none")
    for seed in settings.seeds:
        check_asked(replace(settings.setting, seed=seed))
    tell_uncosted(settings.setting)
    answer = plan(settings)
    show(answer)
    curve = load_curve(settings, answer, loads) if loads else None
    if curve:
        table.plain_console().print("", load_sentence(curve, answer.gpu), "", load_table(curve), sep="\n")
    if curve and given["plot"]:
        draw(curve, answer.gpu, given["plot"])
    if given["json"]:
        result_files.write_json(given["json"], msgspec.to_builtins(answer) | {"more_traffic": curve})


def settings_of(given: Mapping[str, Any]) -> PlanSettings:
    """Raises UserError."""
    workload, trace = given["workload"], given["trace"]
    if (workload is None) == (trace is None):
        raise UserError("give one of --workload and --trace")
    if trace and given["seeds"]:
        raise UserError("--seeds is of --workload; a trace is drawn already")
    policies = tuple(dict.fromkeys(recipe(name).name for name in given["policy"] or (OURS,)))
    if given["most"] == 1 and (apart := next((name for name in policies if name in APART), None)):
        raise UserError(f"--most 1: {apart} keeps prefill and decode apart, which takes two GPUs")
    seeds = 1 if trace else given["seeds"] or _SEEDS
    setting = Setting(policy=policies[0], workload=workload, trace=str(trace) if trace else None, **chosen(given))
    return PlanSettings(
        setting=setting,
        policies=policies,
        seeds=tuple(range(given["seed"], given["seed"] + seeds)),
        most=given["most"],
        jobs=given["jobs"] or cores(),
    )


def show(answer: Plan) -> None:
    """The answer first."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column("")
    for title in _TITLES:
        shown.add_column(title, justify="right")
    for need in answer.needs:
        shown.add_row(need.contender, *_cells(need))
    table.plain_console().print(sentence(answer), "", shown, "", memory(answer), sep="\n")


def sentence(answer: Plan) -> str:
    """The number of GPUs that it takes, or that there may not be enough."""
    first, *others = answer.needs
    if first.gpus.at is None:
        return (
            f"{end_of(first.gpus):g} × {answer.gpu} are not enough for {count(answer.models, 'model')}: "
            f"{percent(first.enough.ttft_attainment)} of first tokens and {percent(first.enough.attainment)} of tokens "
            "on time. Allow more (--most), later tokens (--slo), or take a faster GPU (--gpu)."
        )
    asked = answer.setting["slo"]
    limits = f"{seconds(asked['ttft_ns'] / NS_PER_S)}, then {seconds(asked['tbt_ns'] / NS_PER_S)} a token"
    told = (
        f"{first.gpus.at:g} × {answer.gpu} serve {count(answer.models, 'model')} with 99 % of first tokens and 90 % of "
        f"tokens on time (unless a model has its own: {limits})"
    )
    dedicated = next((need for need in others if need.contender == "dedicated"), None)
    if dedicated is None:
        return f"{told}."
    if dedicated.gpus.at is None:
        return f"{told}; with an instance for each model {end_of(dedicated.gpus):g} would not be enough."
    return f"{told}; with an instance for each model it takes {dedicated.gpus.at:g}."


def memory(answer: Plan) -> str:
    """The memory that is needed, and where."""
    first = answer.needs[0]
    gpus, host = round(end_of(first.gpus)), answer.weight_bytes + first.use.kv_bytes
    return (
        f"Weights {size(answer.weight_bytes)}, of the largest model {size(answer.largest_bytes)}; KV up to "
        f"{size(first.use.kv_bytes)} at once; {gpus} × {answer.gpu} hold {size(gpus * answer.gpu_bytes)}.\n"
        f"Host memory of {size(host)} keeps all of it one copy away; links bring in weights and KV for "
        f"{percent(first.use.link_busy)} of the time.{fetches(answer)}"
    )


def fetches(answer: Plan) -> str:
    """A line where there were any."""
    use = answer.needs[0].use
    if not use.fetches and not use.unfetched:
        return ""
    refused = f"; {count(use.unfetched, 'fetch', 'fetches')} found no room (--cache-size)" if use.unfetched else ""
    return f"\nLazy models took {count(use.fetches, 'fetch', 'fetches')} of {size(use.fetched_bytes)}{refused}."


def _cells(need: Need) -> tuple[str, ...]:
    figures, fewer = need.use.figures, need.fewer
    return (
        str(need.gpus),
        ", ".join(str(found.at) for found in need.found),
        *_shares(need.enough),
        *(_shares(fewer) if fewer else ("-", "-")),
        percent(figures.utilisation),
        percent(need.use.link_busy),
        "-" if figures.ttft_p99_ms is None else seconds(figures.ttft_p99_ms / 1e3),
    )


def _shares(probe: Probe) -> tuple[str, str]:
    return percent(probe.ttft_attainment), percent(probe.attainment)
