"""What a machine's speed does, from readings of a yardstick."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from statistics import median

from aegis.core.clock import NS_PER_S
from aegis.sim.costs import Drift
from aegis.telemetry.spans import SpanKind
from bench.yardstick import Reading

_WINDOW_NS = 10 * NS_PER_S  # some two dozen readings


class Speed:
    """Window by window, beside the usual of all. A time of which nothing is known is like the last before."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        """Raises ValueError where there are none."""
        windows: defaultdict[int, list[Reading]] = defaultdict(list)
        for reading in readings:
            windows[reading.at_ns // _WINDOW_NS].append(reading)
        usual_step, usual_prompt = _medians(readings)
        self._at: dict[int, tuple[float, float]] = {}
        self._first, self._last = min(windows), max(windows)
        for window in range(self._first, self._last + 1):
            if these := windows.get(window):
                step, prompt = _medians(these)
                last = step / usual_step, prompt / usual_prompt
            self._at[window] = last

    def slowness(self, kind: SpanKind, at_ns: int) -> float:
        """Of runs of this kind then, as a multiple of what they usually take."""
        window = min(max(at_ns // _WINDOW_NS, self._first), self._last)
        step, prompt = self._at[window]
        return step if kind is SpanKind.DECODE else prompt

    def damped(self, step: float, prompt: float) -> Speed:
        """To these powers."""
        other = copy(self)
        other._at = {window: (one**step, two**prompt) for window, (one, two) in self._at.items()}
        return other

    def drifts(self, since_ns: int) -> Iterator[Drift]:
        """For a simulation that begins then."""
        for window, (step, prompt) in self._at.items():
            if (window + 1) * _WINDOW_NS > since_ns:
                yield Drift(max(window * _WINDOW_NS - since_ns, 0), round(1e3 * step), round(1e3 * prompt))


def _medians(readings: Sequence[Reading]) -> tuple[float, float]:
    return median(each.step_ns for each in readings), median(each.prompt_ns for each in readings)
