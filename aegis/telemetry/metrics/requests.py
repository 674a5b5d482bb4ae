"""Metrics of requests for Prometheus: vLLM's suffixes and its `model_name` label under `aegis:`.

A proxy tells of the life of each of its requests, times being its own clock's nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from aegis.core.clock import NS_PER_S
from aegis.core.ids import ModelId, RequestId
from aegis.core.model import Slo
from aegis.core.request import FinishReason
from aegis.telemetry import logs
from aegis.telemetry.metrics.series import Families, Series
from aegis.telemetry.metrics.slo_attainment import AttainmentMetrics
from aegis.telemetry.model_counts import Tally
from aegis.telemetry.records import REFUSED


class LogMetrics(Collector):
    """`aegis:log_lines_dropped_total`, of all proxies together."""

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, from any thread."""
        yield CounterMetricFamily(
            "aegis:log_lines_dropped",
            "Log lines that nobody read in time, or a full disk did not take, since the start",
            value=logs.lines_dropped(),
        )


@dataclass(slots=True)
class _Life:
    """A request that has not ended."""

    model: ModelId
    slo: Slo
    arrival_ns: int
    max_tokens: int
    running: bool = False
    started_ns: int | None = None
    first_ns: int | None = None
    last_ns: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _Counts:
    """The counts of one model, beside its series, whose values cannot be read back."""

    waiting: int = 0
    running: int = 0
    arrived: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    tokens: int = 0


class Metrics:
    """The metrics of one proxy. Every request that arrived is reported finished, failed or cancelled, once."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._lives: dict[RequestId, _Life] = {}
        self._attainment = AttainmentMetrics()
        self._series: dict[ModelId, Series] = {}
        self._counts: dict[ModelId, _Counts] = {}
        self._changed: set[ModelId] = set()  # since `news` was last called
        self._families = Families(self.registry)
        self.registry.register(self._attainment)
        self.registry.register(LogMetrics())

    def arrived(
        self, request: RequestId, model: ModelId, slo: Slo, now_ns: int, *, prompt_tokens: int, max_tokens: int
    ) -> None:
        series = self._of(model)
        self._lives[request] = _Life(model, slo, now_ns, max_tokens)
        series.waiting.inc()
        series.prompt_tokens.inc(prompt_tokens)
        counts = self._count(model)
        counts.waiting += 1
        counts.arrived += 1
        counts.prompt_tokens += prompt_tokens

    def started(self, request: RequestId, now_ns: int) -> None:
        """A prefill began, not necessarily its first."""
        life = self._lives[request]
        self._set_running(life, True)
        if life.started_ns is None:
            life.started_ns = now_ns
            self._of(life.model).queue_time.observe((now_ns - life.arrival_ns) / NS_PER_S)

    def token(self, request: RequestId, now_ns: int, count: int = 1) -> None:
        """`count` more tokens came, at once; the first ever ends the prefill."""
        life = self._lives[request]
        series = self._of(life.model)
        if life.first_ns is None:
            life.first_ns = now_ns
            series.first_token.observe((now_ns - life.arrival_ns) / NS_PER_S)
            if life.started_ns is not None:
                series.prefill_time.observe((now_ns - life.started_ns) / NS_PER_S)
        else:
            series.inter_token.observe((now_ns - life.last_ns) / NS_PER_S)
        self._attainment.of(life.model).saw(life.slo, life.arrival_ns, life.tokens, count, now_ns)
        series.generation_tokens.inc(count)
        life.last_ns = now_ns
        life.tokens += count
        self._count(life.model).tokens += count

    def phase(self, requests: Iterable[RequestId], *, running: bool) -> None:
        """Their batch got or lost its turn; losing it is a preemption. Requests that ended meanwhile are ignored."""
        for request in requests:
            life = self._lives.get(request)
            if life and life.running != running:
                self._set_running(life, running)
                if not running:
                    self._of(life.model).preemptions.inc()

    def replayed(self, request: RequestId) -> None:
        """It waits again, to be prefilled with the tokens it has: its instance was lost, or gave its KV up."""
        life = self._lives[request]
        self._set_running(life, False)
        self._families.replays.labels(life.model).inc()

    def finished(self, request: RequestId, reason: FinishReason, now_ns: int) -> None:
        life = self._end(request)
        series = self._of(life.model)
        self._count(life.model).finished += 1
        self._families.success.labels(life.model, reason.value).inc()
        series.e2e.observe((now_ns - life.arrival_ns) / NS_PER_S)
        if life.first_ns is not None and life.tokens > 1:
            series.per_token.observe((life.last_ns - life.first_ns) / (life.tokens - 1) / NS_PER_S)

    def failed(self, request: RequestId, *, refused: bool = False) -> None:
        """The tokens it might still have got are missed, also where it was `refused` after it was taken."""
        life = self._end(request)
        self._count(life.model).failed += 1
        self._families.failure.labels(life.model, REFUSED if refused else "failed").inc()
        self._attainment.of(life.model).missed(life.max_tokens - life.tokens)

    def cancelled(self, request: RequestId) -> None:
        model = self._end(request).model
        self._count(model).cancelled += 1
        self._families.failure.labels(model, "cancelled").inc()

    def answered(self, path: str, code: int, refused: str | None = None) -> None:
        """A client was, whatever it asked for; `path` is one of few, and so is why it was `refused`."""
        self._families.responses.labels(path, str(code)).inc()
        if refused:
            self._families.refused.labels(refused).inc()

    def tallies(self) -> list[Tally]:
        """The counts of every model that had a request."""
        return [self._tally(model) for model in self._counts]

    def changed_tallies(self) -> list[Tally]:
        """The counts that have changed since the last call."""
        changed, self._changed = self._changed, set()
        return [self._tally(model) for model in sorted(changed)]

    # ----------------------------------------------------------------------------------------------------------------

    def _of(self, model: ModelId) -> Series:
        series = self._series.get(model)
        if series is None:
            series = self._series[model] = self._families.of(model)
        return series

    def _count(self, model: ModelId) -> _Counts:
        """To be changed."""
        self._changed.add(model)
        counts = self._counts.get(model)
        if counts is None:
            counts = self._counts[model] = _Counts()
        return counts

    def _tally(self, model: ModelId) -> Tally:
        attainment = self._attainment.of(model)
        return Tally(model, **asdict(self._counts[model]), met=attainment.met, due=attainment.tokens)

    def _set_running(self, life: _Life, running: bool) -> None:
        if life.running != running:
            life.running = running
            series = self._of(life.model)
            (series.running if running else series.waiting).inc()
            (series.waiting if running else series.running).dec()
            counts = self._count(life.model)
            counts.running += 1 if running else -1
            counts.waiting -= 1 if running else -1

    def _end(self, request: RequestId) -> _Life:
        life = self._lives.pop(request)
        series = self._of(life.model)
        (series.running if life.running else series.waiting).dec()
        counts = self._count(life.model)
        if life.running:
            counts.running -= 1
        else:
            counts.waiting -= 1
        return life
