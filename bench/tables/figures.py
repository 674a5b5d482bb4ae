"""The documentation's tables of the papers' figures, from their files in `bench/results`: Prism's, and those of
Aegaeon's that other tables do not have."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.common.provenance import RESULTS
from bench.simulate.prism.claims import lines
from bench.simulate.references import CLAIMS
from bench.simulate.sweep import Crossing
from bench.tables.missed_bars import reason_of_claim
from bench.tables.results import markdown, where

_NOTHING = "Nothing has been simulated yet; the command above does it."

_PERCENTILES = (25, 50, 75, 99)

Panels = Sequence[Mapping[str, Any]]


def figure(name: str, table: Callable[[Panels], str], directory: Path = RESULTS) -> str:
    """A figure of Aegaeon's: where it is from, and the table of its panels."""
    measured = _read(directory, name)
    return _NOTHING if measured is None else f"{_head(name, measured)}\n\n{table(measured['panels'])}"


def switches(panels: Panels) -> str:
    """Switches without their optimisations: a row for each stage."""
    rows = []
    for panel in panels:
        [curve] = panel["curves"]
        at = [f"{100 * point['figures']['attainment']:.0f}" for point in curve["points"]]
        rows.append([panel["title"], _crossing(curve), ", ".join(at)])
    models = ", ".join(f"{point['at']:g}" for point in panels[0]["curves"][0]["points"])
    return markdown(("", "models at 90 %", f"tokens on time, %, at {models} models"), rows)


def ends(panels: Panels) -> str:
    """Up to where each policy has 90 % of all tokens on time: a row for each, a column for each panel."""
    found: dict[str, list[str]] = {}
    for panel in panels:
        for curve in panel["curves"]:
            found.setdefault(curve["policy"], []).append(_crossing(curve))
    rows = [[f"`{policy}`", *at] for policy, at in found.items()]
    return markdown(("", *(panel["title"] for panel in panels)), rows)


def stages(panels: Panels) -> str:
    """Where the time of requests goes: a row for each setup."""
    names = {
        "prefill_wait": "prefill wait",
        "prefill": "prefill",
        "decode_wait": "decode wait",
        "decode": "decode",
        "kv_copies": "KV copies",
        "messages": "messages",
    }
    rows = [
        [panel["title"], *(_percent(panel["result"][name]) for name in names), f"{panel['result']['mean_s']:.1f}"]
        for panel in panels
    ]
    return markdown(("", *(f"{shown}, %" for shown in names.values()), "mean of a request, s"), rows)


def switch_times(panels: Panels) -> str:
    """How long switches take: a row for each model of each setup."""
    rows = [
        [panel["title"], model, str(found["count"]), *(f"{found['cdf_ms'][at - 1]:.0f}" for at in _PERCENTILES)]
        for panel in panels
        for model, found in panel["result"]["switches"].items()
    ]
    return markdown(("", "to", "switches", *(f"p{at}, ms" for at in _PERCENTILES)), rows)


def fragmentation(panels: Panels) -> str:
    """The part of the host's KV slabs that holds nothing, of the most that was held: a row for each size of slab."""
    shapes = list(panels[0]["result"]["shapes"])
    rows = [
        [panel["title"], *(_percent(panel["result"]["shapes"][shape]["of_peak"]) for shape in shapes)]
        for panel in panels
    ]
    return markdown(("", *(f"{shape}, %" for shape in shapes)), rows)


def utilisation(panels: Panels) -> str:
    """How busy GPUs are: a row for each way to use them."""
    shares = ("lowest", "highest", "mean", "attainment")
    rows = [
        [panel["title"], str(panel["result"]["gpus"]), *(_percent(panel["result"][name]) for name in shares)]
        for panel in panels
    ]
    return markdown(("", "GPUs", "idlest, %", "busiest, %", "all, %", "tokens on time, %"), rows)


def _crossing(curve: Mapping[str, Any]) -> str:
    return str(msgspec.convert(curve["crossing"], Crossing))


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def prism(directory: Path = RESULTS) -> str:
    """Prism's figures: shares of first tokens in time and of answers that keep the pace, and what becomes of its
    claims."""
    parts = []
    for name in ("prism_fig5", "prism_fig6", "prism_fig7", "prism_fig9", "prism_fig10", "prism_ablation"):
        measured = _read(directory, name)
        if measured is not None:
            parts.append("\n\n".join([_head(name, measured), *_tables(measured), *_claims(measured)]))
    return "\n\n".join(parts) or _NOTHING


def _tables(measured: Mapping[str, Any]) -> list[str]:
    cells = measured["cells"]
    match measured["form"]:
        case "shares":
            return [_panel(cells, panel) for panel in dict.fromkeys(cell["panel"] for cell in cells)]
        case "timeline":
            return [_timeline(cells)]
        case _:
            rows = [
                [cell["contender"], *(f"{cell['result'][key]:g}" for key in ("weights_gb", "load_s", "first_token_s"))]
                for cell in cells
            ]
            return [markdown(("model", "weights, GB", "load, s", "first token, s"), rows)]


def _panel(cells: Sequence[Mapping[str, Any]], panel: str) -> str:
    first, pace = lines(cells, panel, "ttft"), lines(cells, panel, "tpot")
    [head, *_] = [cell for cell in cells if cell["panel"] == panel]
    values = list(next(iter(first.values())))
    rows = [
        [f"`{name}`", *(f"{100 * line[at]:.1f} / {100 * pace[name][at]:.0f}" for at in values)]
        for name, line in first.items()
    ]
    return markdown((f"{panel}: {head['title']}", *(f"{head['key']} {at:g}" for at in values)), rows)


def _timeline(cells: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            f"`{cell['contender']}`",
            f"{sum(cell['result']['tokens_per_s']) / len(cell['result']['tokens_per_s']):.0f}",
            f"{max(cell['result']['tokens_per_s']):.0f}",
            f"{len(cell['result']['tokens_per_s']) * cell['result']['every_s']}",
        ]
        for cell in cells
    ]
    return markdown(("", "tokens/s, mean", "most in 5 s", "all done after, s"), rows)


def _claims(measured: Mapping[str, Any]) -> list[str]:
    rows = [[claim["says"], claim["found"], _verdict(claim)] for claim in measured["claims"]]
    return [markdown(("the paper's order", "here", ""), rows)] if rows else []


def _verdict(claim: Mapping[str, Any]) -> str:
    if claim["held"] is None:
        return "cannot be told"
    return "held" if claim["held"] else f"**missed**: {reason_of_claim(claim['says'])}"


def _head(name: str, measured: Mapping[str, Any]) -> str:
    claim = CLAIMS.get(name)
    return f"**{measured['title']}** ({where(name, measured)})" + (f"  \n{claim}" if claim else "")


def _read(directory: Path, name: str) -> Any:
    file = directory / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
