"""How fast instances make tokens, beside how fast the streams there want them: a step for each TBT.

An instance never rests while there is a stream. So where fewer tokens come than are wanted, it has no time for more,
whatever the reason: steps that take longer than was estimated, changes of models, KV that does not fit, prompts, or a
machine that others use too.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from aegis.core.ids import InstanceId, RequestId
from aegis.core.model import Slo


@dataclass(slots=True)
class _Paced:
    """`wanted` and `made` are tokens: of the window before, and of this one, which began at `window_ns`. A window is a
    TTFT long, the shortest of those streams that have been there since there was none: a deadline that is missed for
    less than that is made up for. A stream with a shorter one begins a new window: of the tokens that were made before
    it is not known when they came. `rate` is what streams want now, in tokens per nanosecond."""

    length_ns: int = 0
    streams: dict[RequestId, float] = field(default_factory=dict)
    rate: float = 0.0
    since_ns: int = 0  # `wanted` has everything before
    window_ns: int = 0
    wanted: list[float] = field(default_factory=lambda: [0.0, 0.0])
    made: list[int] = field(default_factory=lambda: [0, 0])

    def begin(self, request: RequestId, slo: Slo, now_ns: int) -> None:
        if not self.streams:
            self.rate = 0.0
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

    def _measure(self, length_ns: int, now_ns: int) -> None:
        """From now on, in windows of this length."""
        self.length_ns, self.since_ns, self.window_ns = length_ns, now_ns, now_ns
        self.wanted, self.made = [0.0, 0.0], [0, 0]

    def until(self, now_ns: int) -> None:
        """Counts what was wanted."""
        if now_ns - self.window_ns >= self.length_ns:
            self._turn(now_ns)
        self.wanted[1] += self.rate * (now_ns - self.since_ns)
        self.since_ns = now_ns

    def _turn(self, now_ns: int) -> None:
        whole = (now_ns - self.window_ns) // self.length_ns
        end_ns = self.window_ns + whole * self.length_ns
        if whole == 1:
            last, made = self.wanted[1] + self.rate * (end_ns - self.since_ns), self.made[1]
        else:
            last, made = self.rate * self.length_ns, 0
        self.wanted, self.made = [last, 0.0], [made, 0]
        self.window_ns = self.since_ns = end_ns


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
        paced.made[1] += count

    def left(self, instance: InstanceId, request: RequestId, now_ns: int) -> None:
        """The request is there no more; it may never have begun."""
        paced = self._paced.get(instance)
        if paced is None or request not in paced.streams:
            return
        paced.until(now_ns)
        paced.rate -= paced.streams.pop(request)

    def down(self, instance: InstanceId) -> None:
        self._paced.pop(instance, None)

    def stretch(self, instance: InstanceId, now_ns: int, coming: int = 0) -> float:
        """How many times as fast as tokens came from there they were wanted, and are wanted now; `coming` requests want
        as much as those that stream, but had no token yet. 0 where neither is more than all, or for less than a
        window."""
        paced = self._paced.get(instance)
        if paced is None or not paced.streams:
            return 0.0
        paced.until(now_ns)
        if not paced.wanted[0]:
            return 0.0  # streams that have just begun have their tokens at the end of a run
        made = max(sum(paced.made), 1)
        now = paced.rate * (now_ns - paced.window_ns + paced.length_ns)
        stretch = min(sum(paced.wanted), now) / made
        return stretch * (1 + coming / len(paced.streams)) if stretch > 1 else 0.0

    def streams(self, instance: InstanceId) -> int:
        paced = self._paced.get(instance)
        return len(paced.streams) if paced else 0
