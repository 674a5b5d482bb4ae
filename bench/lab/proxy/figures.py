"""The figures of two proxies side by side, and what their ratio has to be."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from rich.console import Console

LATENCY_RATIO_MAX = 0.25
RATE_RATIO_MIN = 4.0


class Row(Struct, frozen=True):
    """A figure of both proxies, or of aegis's alone; `wanted` is of the last number that is there: the ratio, or
    aegis's own. `ok` None: it was measured for information."""

    name: str
    unit: str
    aegis: float
    litellm: float | None = None
    ratio: float | None = None
    wanted: str = ""
    ok: bool | None = None


def compared(
    name: str, unit: str, mine: float, other: float | None, *, most: float | None = None, least: float | None = None
) -> Row:
    """The ratio of both is to be at most or at least that."""
    if other is None:
        return Row(name, unit, mine)
    ratio = mine / other
    if most is not None:
        return Row(name, unit, mine, other, ratio, f"≤ {most:g}", ratio <= most)
    if least is not None:
        return Row(name, unit, mine, other, ratio, f"≥ {least:g}", ratio >= least)
    return Row(name, unit, mine, other, ratio)


def show(rows: Sequence[Row], *, alone: bool) -> None:
    """Prints them. `alone`: aegis was."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    console.print(f"{'':46} {'aegis':>9} {'LiteLLM':>9} {'ratio':>7}")
    for row in rows:
        name = f"{row.name}, {row.unit}" if row.unit else row.name
        litellm, ratio = (f"{value:9.4g}" if value is not None else "" for value in (row.litellm, row.ratio))
        console.print(f"{name:46} {row.aegis:9.4g} {litellm:>9} {ratio:>9} {row.wanted}".rstrip())
    if alone:
        console.print("LiteLLM was not measured: --litellm PYTHON names an interpreter that has litellm[proxy].")
