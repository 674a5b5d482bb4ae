"""Timelines of several servers, one below the other: the tokens of a stream, and two prompts beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from bench.interference.suite import Timeline

WIDTH, LEFT, RIGHT = 900, 150, 20
PANEL, TOP, BOTTOM = 74, 34, 30
_BEFORE_S = 0.3
_AFTER_S = 0.5
_STYLE = """
text { font: 12px sans-serif; fill: #444 }
.name { font-weight: bold }
.token { stroke: #2563eb; stroke-width: 1 }
.long { fill: #f59e0b }
.short { fill: #10b981 }
.axis { stroke: #999 }
rect.ground { fill: #fff }
"""


def svg(title: str, panels: Sequence[tuple[str, Timeline]]) -> str:
    """On one axis of seconds since the long prompt was sent. A tick is a token of the stream; a bar is a prompt, from
    when it was sent until its first token."""
    last_s = max(timeline.long_s for _, timeline in panels) + _AFTER_S
    height = TOP + PANEL * len(panels) + BOTTOM

    def x(at_s: float) -> str:
        return f"{LEFT + (at_s + _BEFORE_S) / (last_s + _BEFORE_S) * (WIDTH - LEFT - RIGHT):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{height}"/>',
        f'<text x="10" y="20">{escape(title)}</text>',
    ]
    for row, (name, timeline) in enumerate(panels):
        parts += _panel(name, timeline, TOP + PANEL * row, last_s, x)
    foot = TOP + PANEL * len(panels) + 4
    parts.append(f'<path class="axis" d="M{x(-_BEFORE_S)} {foot}H{x(last_s)}"/>')
    parts += [f'<text x="{x(s)}" y="{foot + 16}">{s} s</text>' for s in range(int(last_s) + 1)]
    return "\n".join([*parts, "</svg>", ""])


def _panel(name: str, timeline: Timeline, top: int, last_s: float, x: Callable[[float], str]) -> list[str]:
    def bar(kind: str, y: int, start_s: float, stop_s: float) -> str:
        width = float(x(stop_s)) - float(x(start_s))
        return f'<rect class="{kind}" x="{x(start_s)}" y="{y}" width="{width:.1f}" height="9"/>'

    seen = [at_s for at_s in timeline.tokens_s if -_BEFORE_S <= at_s <= last_s]
    ticks = "".join(f"M{x(at_s)} {top + 30}v26" for at_s in seen)
    return [
        f'<text class="name" x="10" y="{top + 16}">{escape(name)}</text>',
        f'<text x="10" y="{top + 47}">tokens of the stream</text>',
        bar("long", top + 4, 0, timeline.long_s),
        bar("short", top + 16, timeline.short_sent_s, timeline.short_s),
        f'<path class="token" d="{ticks}"/>',
    ]
