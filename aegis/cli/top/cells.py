"""Numbers, bars and colours as a terminal shows them."""

from __future__ import annotations

from rich.text import Text

from aegis.config.sizes import format_size

COLOURS = ("#4aa3dc", "#dd5216", "#7bf0c8", "#b8608a", "#74cde6", "#f3d53f", "#f8877a", "#7268ee")
"""The colours of the dashboard on dark ground."""

_GOOD, _FAIR = 0.99, 0.9
_MARKS = "●◆■▲▼◉"
_NONE = Text("–", style="dim", justify="right")


def named(model: str, seat: int) -> Text:
    """The name with the mark and colour that are the model's own."""
    mark = _MARKS[seat // len(COLOURS) % len(_MARKS)]
    return Text.assemble((mark, COLOURS[seat % len(COLOURS)]), " ", model)


def count(value: int) -> Text:
    return Text(f"{value:,}", justify="right") if value else _NONE


def rate(per_s: float) -> Text:
    return Text(f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.1f}", justify="right") if per_s else _NONE


def milliseconds(ms: float | None) -> Text:
    if ms is None:
        return _NONE
    return Text(f"{ms / 1000:.2f} s" if ms >= 1000 else f"{ms:.0f} ms", justify="right")


def share(part: float | None) -> Text:
    """The share; it is 100 % only if nothing is missing."""
    if part is None:
        return _NONE
    shown = min(part, 0.999) if part < 1 else 1.0
    style = "green" if part >= _GOOD else "yellow" if part >= _FAIR else "bold red"
    return Text(f"{shown:.1%}", style=style, justify="right")


def size(nbytes: int) -> Text:
    return Text(format_size(nbytes), justify="right") if nbytes else _NONE


def bar(part: float, width: int, style: str = "cyan") -> Text:
    """A bar that is filled to the eighth of a letter."""
    eighths = round(min(max(part, 0.0), 1.0) * width * 8)
    full, rest = divmod(eighths, 8)
    drawn = "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
    return Text.assemble((drawn, style), ("·" * (width - len(drawn)), "dim"))
