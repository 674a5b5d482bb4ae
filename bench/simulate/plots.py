"""Drawing curves: attainment over what is swept, the 90 % line, and where each curve falls below it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aegis.core.errors import UserError
from bench.simulate.study import Curve
from bench.simulate.sweep import GOAL

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS = (".png", ".svg")
_WIDTH_IN, _HEIGHT_IN = 5.2, 3.8
_COLUMNS_MAX = 3
_MARKERS = "os^vDPX*"


def check(file: Path) -> None:
    """Before hours are spent on what cannot be drawn. Raises UserError."""
    if file.suffix not in _KINDS:
        raise UserError(f"--plot {file}: should end in {' or '.join(_KINDS)}")


def sheet(panels: int, title: str = "") -> tuple[Figure, list[Axes]]:
    """An empty figure with room for so many panels."""
    from matplotlib.figure import Figure

    columns = min(panels, _COLUMNS_MAX)
    rows = -(-panels // columns)
    figure = Figure(figsize=(_WIDTH_IN * columns, _HEIGHT_IN * rows), layout="constrained")
    figure.suptitle(title)
    axes = [figure.add_subplot(rows, columns, index + 1) for index in range(panels)]
    return figure, axes


def save(figure: Figure, file: Path) -> None:
    """The same figure makes the same bytes. Raises UserError."""
    import matplotlib

    dateless = {"Date": None} if file.suffix == ".svg" else {}
    try:
        with matplotlib.rc_context({"svg.hashsalt": "aegis"}):
            figure.savefig(file, dpi=120, metadata=dateless)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None


def draw(axes: Axes, curves: Sequence[Curve], key: str | None, title: str = "") -> None:
    """A line per policy where something is swept, else a bar."""
    axes.set_title(title, fontsize="medium")
    axes.set_ylabel("tokens on time, %")
    axes.set_ylim(0, 105)
    axes.axhline(100 * GOAL, color="grey", linestyle="--", linewidth=0.8)
    if key is None:
        axes.bar([curve.policy for curve in curves], [100 * curve.points[0].figures.attainment for curve in curves])
        axes.tick_params(axis="x", rotation=20)
        return
    for index, curve in enumerate(curves):
        values = [point.at for point in curve.points]
        shares = [100 * point.figures.attainment for point in curve.points]
        color = f"C{index}"
        style = {"color": color, "marker": _MARKERS[index % len(_MARKERS)], "markersize": 3.5, "linewidth": 1.2}
        axes.plot(values, shares, label=curve.policy, **style)  # type: ignore[arg-type]
        if curve.crossing and curve.crossing.at is not None:
            axes.axvline(curve.crossing.at, color=color, linestyle=":", linewidth=0.8)
    axes.set_xlabel({"models": "models", "rps": "requests per second and model"}.get(key, key))
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small", loc="lower left")
