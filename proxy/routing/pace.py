"""How fast instances make tokens, beside how fast the streams there want them: a step for each TBT.

An instance never rests while there is a stream. So where fewer tokens come than are wanted, it has no time for more,
whatever the reason: steps that take longer than was estimated, changes of models, KV that does not fit, prompts, or a
machine that others use too.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from aegis.core.ids import InstanceId, RequestId
from aegis.core.model import Slo

_NEWEST_SHARE: Final = 1 / 4


@dataclass(slots=True)
class _Paced:
    """`wanted` and `made` are tokens of the window that began at `window_ns`. A window is as long as the shortest TTFT
    of the streams that came since there was none: what is missed for less than that is made up for. A stream with a
    shorter one begins a new window, because it is not known when the tokens of the old one came. `rate` is what streams
    want now, in tokens per nanosecond. `lack` is the average of the windows that have ended, in which each has
    `_NEWEST_SHARE` when it ends."""

    length_ns: int = 0
    streams: dict[RequestId, float] = field(default_factory=dict)
    rate: float = 0.0
    since_ns: int = 0  # `wanted` has everything before
    window_ns: int = 0
    wanted: float = 0.0
    made: int = 0
    lack: float = 0.0

    def begin(self, request: RequestId, slo: Slo, now_ns: int) -> None:
        if not self.streams:
            self.rate = 0.0
            if self.length_ns:
                self.until(now_ns)
            self._measure(slo.ttft_ns, now_ns)
        self.wants(request, slo, now_ns)

    def wants(self, request: RequestId, slo: Slo, now_ns: int) -> None:
        """From now on the stream wants a token every TBT."""
        self.until(now_ns)
        if slo.ttft_ns < self.length_ns:
            self._measure(slo.ttft_ns, now_ns)
        rate = 1 / slo.tbt_ns
        self.rate += rate - self.streams.get(request, 0.0)
        self.streams[request] = rate

    def until(self, now_ns: int) -> None:
        """Counts what was wanted."""
        if now_ns - self.window_ns >= self.length_ns:
            self._turn(now_ns)
        self.wanted += self.rate * (now_ns - self.since_ns)
        self.since_ns = now_ns

    def _measure(self, length_ns: int, now_ns: int) -> None:
        """From now on, in windows of this length."""
        self.length_ns, self.since_ns, self.window_ns = length_ns, now_ns, now_ns
        self.wanted, self.made = 0.0, 0

    def _turn(self, now_ns: int) -> None:
        """Windows have ended. All tokens that came are of the first one of them."""
        ended = (now_ns - self.window_ns) // self.length_ns
        first_ns, end_ns = self.window_ns + self.length_ns, self.window_ns + ended * self.length_ns
        self._average(_lack(self.wanted + self.rate * (first_ns - self.since_ns), self.made), 1)
        self._average(_lack(self.rate * self.length_ns, 0), ended - 1)
        self._measure(self.length_ns, end_ns)

    def _average(self, lack: float, windows: int) -> None:
        self.lack += (lack - self.lack) * (1 - (1 - _NEWEST_SHARE) ** windows)


def _lack(wanted: float, made: int) -> float:
    return max(1 - made / wanted, 0.0) if wanted >= 1 else 0.0


class Pace:
    """How well the instances that decode keep up with the streams of one proxy."""

    __slots__ = ("_paced",)

    def __init__(self) -> None:
        self._paced: defaultdict[InstanceId, _Paced] = defaultdict(_Paced)

    def tokens(self, instance: InstanceId, request: RequestId, count: int, slo: Slo, now_ns: int) -> None:
        """So many tokens of the request came from the instance; the first ones begin a stream."""
        paced = self._paced[instance]
        rate = paced.streams.get(request)
        if rate is None:
            paced.begin(request, slo, now_ns)
        elif rate != 1 / slo.tbt_ns:  # its model has other SLOs by now
            paced.wants(request, slo, now_ns)
        elif now_ns - paced.window_ns >= paced.length_ns:
            paced.until(now_ns)
        paced.made += count

    def left(self, instance: InstanceId, request: RequestId, now_ns: int) -> None:
        """The request is there no more; it may never have begun."""
        paced = self._paced.get(instance)
        if paced is None or request not in paced.streams:
            return
        paced.until(now_ns)
        paced.rate -= paced.streams.pop(request)

    def down(self, instance: InstanceId) -> None:
        self._paced.pop(instance, None)

    def lack(self, instance: InstanceId, now_ns: int) -> float:
        """The part of the tokens wanted in a window by the streams there that did not come, on average of the last
        windows. More tokens than were wanted in one window do not make up for a lack in another."""
        paced = self._paced.get(instance)
        if paced is None:
            return 0.0
        paced.until(now_ns)
        return paced.lack
