"""What Prism's paper says of its figures, beside what is measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from bench.simulate.prism.suite import MUX, ON_DEMAND, OURS, PRISM, STATIC

_GOAL = 0.99
_SAME = 0.005  # of shares that are taken for equal
_RIVALS = (STATIC, MUX, "qlm", "serverlessllm")


class Claim(Struct, frozen=True):
    """`held`: None where it could not be told."""

    says: str
    found: str
    held: bool | None


Line = Mapping[float, float]
"""A share of requests at each value of a panel."""


def lines(cells: Sequence[Mapping[str, Any]], panel: str, share: str) -> dict[str, Line]:
    """The line of each contender of the panel."""
    found: dict[str, dict[float, float]] = {}
    for cell in cells:
        if cell["panel"] == panel:
            found.setdefault(cell["contender"], {})[cell["at"]] = cell["result"][share]
    return {name: dict(sorted(line.items())) for name, line in found.items()}


def least(line: Line) -> float | None:
    """The least value from which on the share is 99 %; None: not even at the last one."""
    enough = None
    for at, share in reversed(list(line.items())):
        if share < _GOAL:
            break
        enough = at
    return enough


def claims(suite: str, cells: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """What the paper claims of the figure."""
    panels = list(dict.fromkeys(cell["panel"] for cell in cells))
    if suite == "prism-fig5":
        return [ordering(panel, lines(cells, panel, "ttft"), name) for panel in panels for name in (PRISM, ON_DEMAND)]
    if suite == "prism-fig7":
        return [_placement(panel, lines(cells, panel, "ttft")) for panel in panels]
    if suite == "prism-fig9":
        return [
            claim
            for panel in panels
            for name in (PRISM, ON_DEMAND)
            for claim in savings(panel, lines(cells, panel, "ttft"), name)
        ]
    return []


def ordering(panel: str, found: Mapping[str, Line], prism: str = PRISM) -> Claim:
    """Figure 5: Prism has more first tokens in time than all others, or as many, at each point."""
    behind = [
        f"{name} at {at:g}: {100 * line[at]:.1f} to {100 * found[prism][at]:.1f} %"
        for name, line in found.items()
        if name in _RIVALS
        for at in line
        if line[at] > found[prism][at] + _SAME
    ]
    return Claim(f"{panel}: no rival ahead of {prism} by over 0.5 %", "; ".join(behind) or "none", not behind)


def savings(panel: str, found: Mapping[str, Line], prism: str = PRISM) -> list[Claim]:
    """Figure 9: GPUs for 99 % of first tokens: ours no more than Prism, Prism no more than others and half of
    MuxServe++'s, within a fifth."""
    needed = {name: least(line) for name, line in found.items()}
    told = ", ".join(f"{name} {'more' if gpus is None else f'{gpus:g}'}" for name, gpus in needed.items())
    gpus, infinite = needed[prism], float("inf")
    ours, mux = needed.get(OURS) or infinite, needed.get(MUX) or infinite
    others = [needed.get(name) or infinite for name in _RIVALS]
    said = f"{panel}: GPUs for 99 % of first tokens, "
    if gpus is None:
        return [Claim(f"{said}{OURS} <= {prism} <= others", told, None if min(others) == infinite else False)]
    half = None if mux == infinite else gpus <= 0.6 * mux
    return [
        Claim(f"{said}{OURS} <= {prism}", told, ours <= gpus),
        Claim(f"{said}{prism} <= others", told, gpus <= min(others)),
        Claim(f"{said}{prism} <= half of {MUX}'s, + 20 %", told, half),
    ]


def _placement(panel: str, found: Mapping[str, Line]) -> Claim:
    """Figure 7: more first tokens in time where models are placed by KV pressure."""
    placed, stay = found[PRISM], found[f"{PRISM}, models stay"]
    told = ", ".join(f"x{at:g}: {100 * placed[at]:.1f} to {100 * stay[at]:.1f} %" for at in placed)
    return Claim(f"{panel}: placement helps", told, all(placed[at] >= stay[at] - _SAME for at in placed))
