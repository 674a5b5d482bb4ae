"""Published measurements of the points that a suite simulates.

There are two sources. The paper's text says where curves of Aegaeon's Figures 11 to 13 lie, mostly as ratios. And its
public artifact holds a simulator of its baselines and of its policy (H100 step times, 16 GPUs, 6 + 10): its results
were computed by the strict metric, on the artifact's own inputs as it is shipped, and again with the baselines mended
(the same 49.5 GB/s as Aegaeon's, prefetch, batches of up to 64, an idle GPU first, an oracle that does not preempt) and
with inputs that are Poisson for 600 s.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from bench.simulate.study import Curve
from bench.simulate.sweep import Crossing

_AEGAEON, _SLLM, _SJF, _MUX = "aegaeon", "serverlessllm", "serverlessllm-oracle-sjf", "muxserve"
_SHIPPED = "the public artifact's simulator as shipped, its inputs"
_MENDED = "the public artifact's simulator, baselines mended, its inputs"
_POISSON = "the public artifact's simulator, baselines mended, Poisson for 600 s"
_PAPER = "Aegaeon, SOSP'25, "


class Reference(Struct, frozen=True):
    """The point at which a policy's curve falls below 90 %. `as_published`: of the policies as their papers have
    them."""

    policy: str
    crossing: Crossing
    source: str
    as_published: bool


def _paper(policy: str, at: float, source: str) -> Reference:
    return Reference(policy, Crossing(at=at), _PAPER + source, True)


def _shipped(policy: str, crossing: Crossing) -> Reference:
    return Reference(policy, crossing, _SHIPPED, True)


def _mended(policy: str, crossing: Crossing, source: str = _MENDED) -> Reference:
    return Reference(policy, crossing, source, False)


def _at(value: float) -> Crossing:
    return Crossing(at=value)


def _above(value: float) -> Crossing:
    return Crossing(above=value)


def _below(value: float) -> Crossing:
    return Crossing(below=value)


_MUX_32 = _paper(_MUX, 32, "§7.2: at most 32 models in every setup, no more than two fit on a GPU")

REFERENCES: dict[str, tuple[Reference, ...]] = {
    "fig11a": (
        _paper(_AEGAEON, 70, "§7.2: up to 70 models"),
        _paper(_SLLM, 35, "§7.2: Aegaeon sustains 2 times its goodput"),
        _MUX_32,
        _shipped(_AEGAEON, _at(74)),
        _shipped(_SLLM, _at(44)),
        _shipped(_SJF, _at(41)),
        _mended(_AEGAEON, _at(79), _POISSON),
        _mended(_SLLM, _at(66), _POISSON),
        _mended(_SJF, _at(82), _POISSON),
    ),
    "fig11b": (
        _MUX_32,
        _shipped(_AEGAEON, _at(50)),
        _shipped(_SLLM, _at(18)),
        _shipped(_SJF, _below(16)),
        _mended(_AEGAEON, _above(54)),
        _mended(_SLLM, _at(27)),
        _mended(_SJF, _at(40)),
    ),
    "fig12a": (_MUX_32,),
    "fig12b": (_MUX_32,),
    "fig12c": (_MUX_32,),
    "fig12d": (_MUX_32,),
    "fig13a": (
        _paper(_AEGAEON, 48, "§7.2: at least 50 % more models than MuxServe's 32"),
        _shipped(_AEGAEON, _at(52)),
        _shipped(_SLLM, _at(34)),
        _shipped(_SJF, _at(36)),
        _mended(_AEGAEON, _at(58)),
        _mended(_SLLM, _at(69)),
        _mended(_SJF, _above(80)),
    ),
    "fig13b": (
        _paper(_AEGAEON, 36, "§7.2: at least 12.5 % more models than MuxServe's 32"),
        _shipped(_AEGAEON, _at(43)),
        _shipped(_SLLM, _at(28)),
        _shipped(_SJF, _at(35)),
        _mended(_AEGAEON, _at(49)),
        _mended(_SLLM, _at(62)),
        _mended(_SJF, _at(72)),
    ),
    "fig13c": (_MUX_32,),
}
"""By suite and panel."""

CLAIMS: dict[str, str] = {
    "fig7": _PAPER + "§5.1: component reuse removes over 80 % of the time of a switch, all optimisations up to 97 %",
    "fig18": _PAPER + "§7.5: utilisation from 13.3 % to 33.9 % before to 48.1 % after",
    "fig11b": _PAPER + "§7.2: 2.5 times ServerlessLLM's request rate",
    "fig11c": _PAPER + "§7.2: effective over 0.05 to 0.75 requests per second, the others quickly penalised",
    "fig12": _PAPER + "§7.2: up to 2.5 times ServerlessLLM's goodput with longer outputs",
    "fig13": _PAPER + "§7.2: at 0.2 times the SLO no better than MuxServe, and better than ServerlessLLM",
    "fig14": _PAPER + "§7.3: waiting for prefill stays controlled; waiting to decode is spread over the request",
    "fig15": _PAPER + "§7.3: about half of the switches take next to nothing, the others less than 1 s; KV transfers"
    " cost a request less than 1 s",
    "fig16": _PAPER + "§7.3: overall fragmentation below 20 %",
    "fig17": _PAPER + "§7.4: a decent attainment on A10; 72B models with TP = 4 served alike",
}
"""The paper's statements about a figure besides crossings."""


class Comparison(Struct, frozen=True):
    """`difference_percent` is ours above theirs, where both have a crossing within what was swept."""

    policy: str
    ours: str
    theirs: str
    difference_percent: float | None
    source: str


def compare(name: str, curves: Sequence[Curve], *, as_published: bool) -> list[Comparison]:
    """Compares the curves with every reference that is about the same thing."""
    fallen = {curve.policy: curve.crossing for curve in curves if curve.crossing}
    return [
        Comparison(each.policy, str(ours), str(each.crossing), _difference(ours, each.crossing), each.source)
        for each in REFERENCES.get(name, ())
        if each.as_published == as_published and (ours := fallen.get(each.policy))
    ]


def _difference(ours: Crossing, theirs: Crossing) -> float | None:
    if ours.at is None or theirs.at is None:
        return None
    return round(100 * (ours.at / theirs.at - 1), 1)
