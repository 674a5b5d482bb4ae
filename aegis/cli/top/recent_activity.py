"""The recent activity of a server, from its answers so far. Knows no terminal and no clock but the server's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.ids import InstanceId, ModelId
from aegis.telemetry.live_view import Live, LiveInstance, LiveModel, LiveUpdate, SeenUntil
from aegis.telemetry.memory_report import MemoryReport
from aegis.telemetry.model_counts import Tally
from aegis.telemetry.spans import SpanKind

MINUTE_NS = 60 * NS_PER_S
RATE_NS = 5 * NS_PER_S
_RUNS = (SpanKind.PREFILL, SpanKind.DECODE)
_NOTHING = Tally(ModelId(""))


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """`busy` is the share of the last seconds in which it ran something, `held_bytes` what it has of its device."""

    now: LiveInstance
    busy: float
    held_bytes: int


@dataclass(frozen=True, slots=True)
class ModelRow:
    """`on_time` is the share of the last minute's tokens, `first_token_ms` its median; None if there was none."""

    now: LiveModel
    tokens_per_s: float
    on_time: float | None
    first_token_ms: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The totals of all models; `switches` are those of the last minute."""

    tokens_per_s: float
    on_time: float | None
    running: int
    waiting: int
    switches: int


@dataclass(frozen=True, slots=True)
class _Sample:
    at_ns: int
    tallies: dict[ModelId, Tally]


class RecentActivity:
    """The recent activity of one start of a server."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._runs: deque[tuple[InstanceId, int, int]] = deque()  # start and stop
        self._firsts: deque[tuple[int, ModelId, float]] = deque()  # when, and after how many milliseconds
        self._switches: deque[int] = deque()  # when

    def add(self, live: Live) -> None:
        self._learn(live.news)
        self._samples.append(_Sample(live.now_ns, {model.tally.model: model.tally for model in live.models}))
        self._forget(live.now_ns - MINUTE_NS)

    def summary(self, live: Live) -> Summary:
        models = [model.tally.model for model in live.models]
        return Summary(
            tokens_per_s=self._tokens_per_s(models),
            on_time=self._on_time(models),
            running=sum(model.tally.running for model in live.models),
            waiting=sum(model.tally.waiting for model in live.models),
            switches=len(self._switches),
        )

    def instances(self, live: Live) -> list[InstanceRow]:
        held = _held_bytes(live.memory)
        return [
            InstanceRow(now, self._busy(now.instance, live.now_ns), held.get(now.instance, 0)) for now in live.instances
        ]

    def models(self, live: Live) -> list[ModelRow]:
        return [self._model(now) for now in live.models]

    def _model(self, now: LiveModel) -> ModelRow:
        name = now.tally.model
        firsts = [took_ms for _, model, took_ms in self._firsts if model == name]
        return ModelRow(now, self._tokens_per_s([name]), self._on_time([name]), median(firsts) if firsts else None)

    def _busy(self, instance: InstanceId, now_ns: int) -> float:
        """A run is reported when it ends, so one that goes on is not counted yet."""
        since_ns = max(now_ns - RATE_NS, self._samples[0].at_ns)
        ran_ns = sum(stop_ns - max(start_ns, since_ns) for who, start_ns, stop_ns in self._runs
                     if who == instance and stop_ns > since_ns)  # fmt: skip
        return min(ran_ns / (now_ns - since_ns), 1.0) if now_ns > since_ns else 0.0

    def _tokens_per_s(self, models: Sequence[ModelId]) -> float:
        since = self._ago(RATE_NS)
        lasted_ns = self._samples[-1].at_ns - since.at_ns
        return self._gain(since, models, lambda tally: tally.tokens) * NS_PER_S / lasted_ns if lasted_ns else 0.0

    def _on_time(self, models: Sequence[ModelId]) -> float | None:
        minute = self._ago(MINUTE_NS)
        due = self._gain(minute, models, lambda tally: tally.due)
        return self._gain(minute, models, lambda tally: tally.met) / due if due else None

    def _gain(self, since: _Sample, models: Sequence[ModelId], number: Callable[[Tally], int]) -> int:
        last = self._samples[-1].tallies
        return sum(number(last.get(model, _NOTHING)) - number(since.tallies.get(model, _NOTHING)) for model in models)

    def _ago(self, duration_ns: int) -> _Sample:
        """The last answer that is so old, or the oldest."""
        at_ns = self._samples[-1].at_ns - duration_ns
        return next((sample for sample in reversed(self._samples) if sample.at_ns <= at_ns), self._samples[0])

    def _learn(self, news: LiveUpdate) -> None:
        for span in news.spans:
            if span.kind in _RUNS:
                self._runs.append((span.instance, span.start_ns, span.stop_ns))
            elif span.kind is SpanKind.SWITCH:
                self._switches.append(span.stop_ns)
        for record in news.records:
            if record.first_ns is not None:
                took_ms = (record.first_ns - record.arrival_ns) / NS_PER_MS
                self._firsts.append((record.first_ns, record.model, took_ms))

    def _forget(self, before_ns: int) -> None:
        while len(self._samples) > 1 and self._samples[1].at_ns <= before_ns:
            self._samples.popleft()
        while self._runs and self._runs[0][2] < before_ns:
            self._runs.popleft()
        while self._firsts and self._firsts[0][0] < before_ns:
            self._firsts.popleft()
        while self._switches and self._switches[0] < before_ns:
            self._switches.popleft()


class FollowedServer:
    """Follows one server over its starts: `add` what it answers to a question for `seen`."""

    def __init__(self) -> None:
        self.seen = SeenUntil()
        self.activity = RecentActivity()
        self._start: int | None = None

    def add(self, live: Live) -> bool:
        """False for the first answer of another start: its news begin before it, and have to be asked for."""
        known = self._start in (None, live.start)
        self._start = live.start
        if not known:
            self.seen, self.activity = SeenUntil(), RecentActivity()
            return False
        self.seen = live.news.seen
        self.activity.add(live)
        return True


def _held_bytes(memory: MemoryReport) -> dict[InstanceId, int]:
    return {each.instance: each.held_bytes for device in memory.devices for each in device.instances}
