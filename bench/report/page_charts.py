"""Charts of a report's page: lines as SVG, shares as bars of HTML. Each comes with a text that says the same.

Colours and letters are the page's, so that a chart follows the reader's theme. The plots that `aegis simulate --plot`
writes as files are others, by matplotlib: `bench/simulate/plot_files.py` says why.

A chart is 400 units wide, so that a telephone shows its letters in their size and a wider page shows them larger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log10

from bench.common.numbers import decades, percent, ticks
from bench.report.markup import Markup, element, joined

_WIDTH, _HEIGHT = 400, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 20, 8, 38
_DASHES = (None, "7 3", "2 3", "9 3 2 3", "12 4")
COLOURS = 8


@dataclass(frozen=True, slots=True)
class Series:
    """`points` from left to right."""

    name: str
    points: Sequence[tuple[float, float]]
    marked: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """`low` and `high` are None where the points decide; `goal` is drawn across."""

    label: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    percent: bool = False
    goal: float | None = None

    def fitted(self, values: Sequence[float]) -> _Scale:
        if self.log:
            positive = [value for value in values if value > 0] or [1.0]
            marks = decades(min(positive), max(positive))
            if len(marks) == 1:
                marks.append(marks[0] * 10)
            return _Scale(self, marks[0], marks[-1], marks)
        low = min(values, default=0.0) if self.low is None else self.low
        high = max(values, default=1.0) if self.high is None else self.high
        if high <= low:
            high = low + 1
        return _Scale(self, low, high, ticks(low, high))


@dataclass(frozen=True, slots=True)
class _Scale:
    axis: Axis
    low: float
    high: float
    marks: Sequence[float]

    def place(self, value: float) -> float:
        """The place of the value on the axis, in [0, 1]."""
        low, high = self.low, self.high
        if self.axis.log:
            low, high, value = log10(low), log10(high), log10(max(value, self.low))
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def told(self, mark: float) -> str:
        return f"{100 * mark:.0f} %" if self.axis.percent else f"{mark:,g}"


def colour(index: int) -> str:
    return f"var(--c{index % COLOURS})"


def lines(alt: str, series: Sequence[Series], x: Axis, y: Axis) -> Markup:
    """`alt` is the text for readers who do not see the plot."""
    across = x.fitted([at for each in series for at, _ in each.points])
    up = y.fitted([value for each in series for _, value in each.points])
    drawn = [_curve(index, each, across, up) for index, each in enumerate(series)]
    plot = element(
        "svg",
        *_frame(across, up),
        *drawn,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=alt,
        class_="plot",
    )
    return joined((plot, _line_legend(series)))


def _x(scale: _Scale, value: float) -> float:
    return round(_LEFT + scale.place(value) * (_WIDTH - _LEFT - _RIGHT), 1)


def _y(scale: _Scale, value: float) -> float:
    return round(_HEIGHT - _BOTTOM - scale.place(value) * (_HEIGHT - _TOP - _BOTTOM), 1)


def _frame(across: _Scale, up: _Scale) -> list[Markup]:
    left, right, bottom = _LEFT, _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for mark in up.marks:
        y = _y(up, mark)
        parts.append(element("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
        parts.append(element("text", up.told(mark), x=left - 5, y=y + 3.5, class_="tick end"))
    for mark in across.marks:
        x = _x(across, mark)
        parts.append(element("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, class_="axis"))
        parts.append(element("text", across.told(mark), x=x, y=bottom + 15, class_="tick middle"))
    parts.append(element("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis"))
    if up.axis.goal is not None:
        y = _y(up, up.axis.goal)
        parts.append(element("line", x1=left, x2=right, y1=y, y2=y, class_="goal"))
    parts.append(element("text", across.axis.label, x=(left + right) / 2, y=_HEIGHT - 6, class_="label middle"))
    return parts


def _curve(index: int, series: Series, across: _Scale, up: _Scale) -> Markup:
    places = [(_x(across, at), _y(up, value)) for at, value in series.points]
    style = {"stroke": colour(index), "stroke_dasharray": _DASHES[index % len(_DASHES)]}
    line = element("polyline", points=" ".join(f"{x:g},{y:g}" for x, y in places), class_="curve", **style)
    marks = places if series.marked or len(places) == 1 else []
    dots = [element("circle", cx=f"{x:g}", cy=f"{y:g}", r=2.6, fill=colour(index)) for x, y in marks]
    return element("g", element("title", series.name), line, *dots)


def _line_legend(series: Sequence[Series]) -> Markup:
    entries = []
    for index, each in enumerate(series):
        dash = _DASHES[index % len(_DASHES)]
        line = element("line", x1=0, x2=22, y1=5, y2=5, class_="curve", stroke=colour(index), stroke_dasharray=dash)
        key = element("svg", line, viewBox="0 0 22 10", width=22, height=10, aria_hidden="true")
        entries.append(element("li", key, each.name))
    return element("ul", *entries, class_="legend")


def shares(alt: str, bars: Mapping[str, Mapping[str, float]], parts: Sequence[str]) -> Markup:
    """A horizontal bar for each entry, of `parts` in [0, 1] of it; the rest stays empty."""
    rows = [_bar(name, values, parts) for name, values in bars.items()]
    legend = [
        element("li", element("span", class_="key", style=f"background:{colour(index)}", aria_hidden="true"), part)
        for index, part in enumerate(parts)
    ]
    return joined(
        (element("div", *rows, class_="bars", role="img", aria_label=alt), element("ul", *legend, class_="legend"))
    )


def _bar(name: str, values: Mapping[str, float], parts: Sequence[str]) -> Markup:
    pieces = []
    for index, part in enumerate(parts):
        share = values.get(part, 0.0)
        if share > 0:
            shown = f"{part}: {percent(share)}"
            style = f"width:{100 * share:.2f}%;background:{colour(index)}"
            pieces.append(element("span", style=style, title=shown))
    return element("div", element("span", name, class_="name"), element("div", *pieces, class_="bar"), class_="row")
