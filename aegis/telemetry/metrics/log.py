"""What a process could not log, as a metric."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from aegis.telemetry import logs


class LogMetrics(Collector):
    """`aegis:log_lines_dropped_total`, of all proxies together."""

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, from any thread."""
        yield CounterMetricFamily(
            "aegis:log_lines_dropped", "Log lines that nobody read in time, since the start", value=logs.lines_dropped()
        )
