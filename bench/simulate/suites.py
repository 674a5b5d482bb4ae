"""The figures of Aegaeon's evaluation (§7) as suites: what each of them varies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from aegis.core.errors import UserError
from aegis.core.model import Slo
from bench.simulate import sweep
from bench.simulate.cells.suites import SEARCHES
from bench.simulate.goodput import SUITES as GOODPUT_SUITES
from bench.simulate.overload.suite import NAME as OVERLOAD
from bench.simulate.prism.suite import suites as prism_suites
from bench.simulate.setting import Setting
from bench.simulate.sweep import Sweep
from bench.workloads import spec


class Form(Enum):
    """The kind of measurement of each panel."""

    CURVES = "attainment over what is swept"
    BREAKDOWN = "where the time of requests goes"
    SWITCHING = "how long switches take"
    FRAGMENTATION = "waste in the host's KV slabs"
    UTILISATION = "how busy GPUs are"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """`keys` of the workload without its `generator`: that is for 600 s, or as published the artifact's for
    `published_s`. `policy`: the one that it is of, whichever the suite runs."""

    name: str
    title: str
    keys: str
    sweep: str | None = None
    published_s: int = 60
    setting: Setting
    policy: str | None = None
    generator: str = "poisson"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    name: str
    title: str
    form: Form
    panels: tuple[Panel, ...]
    policies: tuple[str, ...] = ()  # that it is of; none: all
    publishable: bool = True  # it can be run as published


_MANY, _FEW, _RATES = "models=16:112:8", "models=8:72:8", "rps=0.05:0.75:0.05"
_MEASURED_S = 600
"""Of every policy: as the artifact does."""


def _panel(name: str, title: str, keys: str, swept: str | None = None, *, scale: float = 1.0, **fields: Any) -> Panel:
    """`scale` is of both deadlines."""
    slo = Slo(ttft_ns=round(10e9 * scale), tbt_ns=round(100e6 * scale))
    published_s = 120 if "rps=0.1" in keys.split(",") else 60
    setting = Setting(policy="", slo=slo, **fields)
    return Panel(name=name, title=title, keys=keys, sweep=swept, published_s=published_s, setting=setting)


def _scaled(side: str, title: str, keys: str, swept: str, slos: dict[str, Slo], **fields: Any) -> tuple[Panel, ...]:
    panels = ((name, replace(_panel("", "", keys, swept, **fields), title=f"{title}, {name}")) for name in slos)
    return tuple(
        replace(panel, name=f"{side}-{name}", setting=replace(panel.setting, slo=slos[name])) for name, panel in panels
    )


def _slos(default: Slo, part: str) -> dict[str, Slo]:
    """Figure 17: one of the deadlines scaled."""
    scaled = {"strict": 0.5, "normal": 1.0, "loose": 2.0}
    return {
        name: Slo(
            ttft_ns=round(default.ttft_ns * (scale if part == "ttft" else 1)),
            tbt_ns=round(default.tbt_ns * (scale if part == "tbt" else 1)),
        )
        for name, scale in scaled.items()
    }


_A10_MODELS = ",".join(("yi-1.5-6b:1", "qwen2.5-7b:1") * 6)
_A10 = {"gpu": "a10", "models": _A10_MODELS, "prefill": 2, "decode": 2, "mixed": 4}
_TP4 = {"gpu": "h800x4", "models": "qwen2.5-72b", "prefill": 1, "decode": 1, "mixed": 2}
_SETUPS = (("0.1", 24), ("0.1", 48), ("0.1", 72), ("0.5", 16), ("0.5", 32), ("0.5", 48))
_INIT_NS, _REUSED_NS = 22_300_000_000, 800_000_000
_NAIVE_BYTES_PER_S = 2_830_000_000
"""A switch to a 13B model takes 26.9 s without optimisations, of which 4.6 s load the weights at 2.83 GB/s; with reused
components over 80 % less (Aegaeon §5.1)."""
_STAGES: tuple[tuple[str, str, dict[str, int], bool], ...] = (
    ("T0", "engines initialised anew", {"switch_ns": _INIT_NS, "link_bytes_per_s": _NAIVE_BYTES_PER_S}, False),
    ("T1", "components reused", {"switch_ns": _REUSED_NS, "link_bytes_per_s": _NAIVE_BYTES_PER_S}, False),
    ("T2", "and memory managed", {}, False),
    ("T3", "and copies beside the work", {}, True),
)
_BEFORE_AFTER = "models=47,rps=0.2,alpha=0.8"
_SLABS = (("1 GiB slabs", 1 << 30), ("256 MiB slabs", 256 << 20), ("64 MiB slabs", 64 << 20))

SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            name="fig11a",
            title="Figure 11(a): 0.1 requests per second and model",
            form=Form.CURVES,
            panels=(_panel("", "ShareGPT, 0.1 rps", "rps=0.1", _MANY),),
        ),
        Suite(
            name="fig11b",
            title="Figure 11(b): 0.5 requests per second and model",
            form=Form.CURVES,
            panels=(_panel("", "ShareGPT, 0.5 rps", "rps=0.5", _FEW),),
        ),
        Suite(
            name="fig11c",
            title="Figure 11(c): 40 models",
            form=Form.CURVES,
            panels=(_panel("", "ShareGPT, 40 models", "models=40", _RATES),),
        ),
        Suite(
            name="fig12",
            title="Figure 12: longer inputs and outputs",
            form=Form.CURVES,
            panels=(
                _panel("a", "ShareGPT-ix2, 0.1 rps", "rps=0.1,ix=2", _MANY),
                _panel("b", "ShareGPT-ox2, 0.1 rps", "rps=0.1,ox=2", _MANY),
                _panel("c", "ShareGPT-ix2, 0.5 rps", "rps=0.5,ix=2", _FEW),
                _panel("d", "ShareGPT-ox2, 0.5 rps", "rps=0.5,ox=2", _FEW),
            ),
        ),
        Suite(
            name="fig13",
            title="Figure 13: stricter deadlines, 0.1 requests per second and model",
            form=Form.CURVES,
            panels=(
                _panel("a", "0.5 × SLO", "rps=0.1", _MANY, scale=0.5),
                _panel("b", "0.3 × SLO", "rps=0.1", _MANY, scale=0.3),
                _panel("c", "0.2 × SLO", "rps=0.1", _MANY, scale=0.2),
            ),
        ),
        Suite(
            name="fig14",
            title="Figure 14: where the time of requests goes",
            form=Form.BREAKDOWN,
            panels=tuple(_panel(f"{n}@{rps}", f"{n} models, {rps} rps", f"models={n},rps={rps}") for rps, n in _SETUPS),
        ),
        Suite(
            name="fig15",
            title="Figure 15: switches, and copies of KV",
            form=Form.SWITCHING,
            panels=(
                _panel("0.1", "64 models, 0.1 rps", "models=64,rps=0.1"),
                _panel("0.5", "40 models, 0.5 rps", "models=40,rps=0.5"),
            ),
        ),
        Suite(
            name="fig16",
            title="Figure 16: fragmentation of the KV cache in host memory, 64 models, 0.1 rps",
            form=Form.FRAGMENTATION,
            panels=tuple(
                _panel(name.replace(" ", "-"), name, "models=64,rps=0.1", slab_bytes=nbytes) for name, nbytes in _SLABS
            ),
        ),
        Suite(
            name="fig17",
            title="Figure 17: four A10, TBT scaled; 72B models on two groups of four H800, TTFT scaled",
            form=Form.CURVES,
            panels=(
                *_scaled("a10", "4 A10", "rps=0.1", "models=4:12:2", _slos(Slo(), "tbt"), **_A10),
                *_scaled(
                    "tp4", "72B, TP 4", "models=4", "rps=0.1:0.7:0.1", _slos(Slo(tbt_ns=200_000_000), "ttft"), **_TP4
                ),
            ),
        ),
        Suite(
            name="fig7",
            title="Figures 7, 8 and 10: switches without their optimisations",
            form=Form.CURVES,
            policies=("aegaeon",),
            publishable=False,
            panels=tuple(
                _panel(name, f"{name}: {title}", "rps=0.1", "models=8:88:16", rules=(("prefetches", beside),), **costs)
                for name, title, costs, beside in _STAGES
            ),
        ),
        Suite(
            name="fig18",
            title="Figure 18: GPUs computing, a model each and shared",
            form=Form.UTILISATION,
            publishable=False,
            panels=(
                replace(
                    _panel("before", "a GPU for each of 47 models", _BEFORE_AFTER, mixed=47),
                    policy="dedicated",
                    generator="market",
                ),
                replace(_panel("after", "Aegaeon, 6 + 10 GPUs", _BEFORE_AFTER), policy="aegaeon", generator="market"),
                replace(
                    _panel("ours", "least-slack, 16 GPUs", _BEFORE_AFTER), policy="least-slack", generator="market"
                ),
            ),
        ),
    )
}
"""Values that the paper leaves open are those of its artifact: six 7B, two 9B and two 13B of ten models, a TBT of 0.2 s
for 72B models. Ours are the setups of Figures 14 and 15, the sizes of slabs in 16 (the artifact's are of 1 GiB), and
factors of 0.5 and 2 on TTFT in 17, as the paper has them on TBT. Of Figure 7 to 10 the paper gives no setting, only
what a switch takes; T2 here loads only what is wanted now, T3 is as the policy has it. Figure 18 is of production
traffic, for which a market stands in."""


def suite(name: str) -> Suite:
    """Raises UserError."""
    if name not in SUITES:
        known = (*SUITES, *SEARCHES, OVERLOAD, *GOODPUT_SUITES, *prism_suites(None))
        raise UserError(f"--suite {name}: should be one of {', '.join(known)}")
    return SUITES[name]


_TINY_S, _TINY_POINTS, _TINY_MODELS = 5, 2, 4


def conditions(panel: Panel, *, as_published: bool, tiny: bool, seed: int) -> Setting:
    """The panel's setting, whole but for the policy. As published it has the GPU that the artifact was measured on."""
    text = f"{'artifact' if as_published else panel.generator}:{panel.keys}"
    seconds = _TINY_S if tiny else panel.published_s if as_published else _MEASURED_S
    text = spec.override(text, "duration", str(seconds))
    if tiny:
        text = spec.override(text, "models", str(_TINY_MODELS))
    setting = replace(panel.setting, workload=text, as_published=as_published, seed=seed)
    return replace(setting, gpu="h100") if as_published and setting.gpu == "h800" else setting


def swept(panel: Panel, *, tiny: bool) -> Sweep | None:
    """The swept values of a panel; in tiny form only the first ones."""
    if panel.sweep is None:
        return None
    whole = sweep.parse(panel.sweep)
    return Sweep(whole.key, whole.values[:_TINY_POINTS]) if tiny else whole
