"""A plan as a sentence and a table."""

from __future__ import annotations

from rich.table import Table

from aegis.core.clock import NS_PER_S
from aegis.core.wording import count
from bench.common.numbers import percent, seconds, size
from bench.plan.search import Need, Plan
from bench.simulate import table
from bench.simulate.cells.figures import value
from bench.simulate.cells.search import Probe

_TITLES = ("GPUs", "of each seed", "first tokens", "tokens", "with one less", "", "computing", "link", "TTFT p99")


def show(plan: Plan) -> None:
    """The answer first."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column("")
    for title in _TITLES:
        shown.add_column(title, justify="right")
    for need in plan.needs:
        shown.add_row(need.contender, *_cells(need))
    table.plain_console().print(sentence(plan), "", shown, "", memory(plan), sep="\n")


def sentence(plan: Plan) -> str:
    """The number of GPUs that it takes, or that there may not be enough."""
    first, *others = plan.needs
    if first.gpus.at is None:
        return (
            f"{value(first.gpus):g} × {plan.gpu} are not enough for {count(plan.models, 'model')}: "
            f"{percent(first.enough.ttft_attainment)} of first tokens and {percent(first.enough.attainment)} of tokens "
            "on time. Allow more (--most), later tokens (--slo), or take a faster GPU (--gpu)."
        )
    asked = plan.setting["slo"]
    limits = f"{seconds(asked['ttft_ns'] / NS_PER_S)}, then {seconds(asked['tbt_ns'] / NS_PER_S)} a token"
    answer = (
        f"{first.gpus.at:g} × {plan.gpu} serve {count(plan.models, 'model')} with 99 % of first tokens and 90 % of "
        f"tokens on time (unless a model has its own: {limits})"
    )
    dedicated = next((need for need in others if need.contender == "dedicated"), None)
    if dedicated is None:
        return f"{answer}."
    if dedicated.gpus.at is None:
        return f"{answer}; with a GPU for each model {value(dedicated.gpus):g} would not be enough."
    return f"{answer}; with a GPU for each model it takes {dedicated.gpus.at:g}."


def memory(plan: Plan) -> str:
    """The memory that is needed, and where."""
    first = plan.needs[0]
    gpus, host = round(value(first.gpus)), plan.weight_bytes + first.use.kv_bytes
    return (
        f"Weights {size(plan.weight_bytes)}, of the largest model {size(plan.largest_bytes)}; KV up to "
        f"{size(first.use.kv_bytes)} at once; {gpus} × {plan.gpu} hold {size(gpus * plan.gpu_bytes)}.\n"
        f"Host memory of {size(host)} keeps all of it one copy away; links bring in weights and KV for "
        f"{percent(first.use.link_busy)} of the time."
    )


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
