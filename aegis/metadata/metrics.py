"""The store as metrics."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aegis.metadata.membership import Membership
from aegis.metadata.recorder import Recorder

_TOLD = {
    "replayed": "Retries answered from the record",
    "taken_over": "Requests that went on from where another proxy, or an earlier connection, left them",
    "written_batches": "Batches of tokens that were written",
    "restored": "Records written again because the server had lost them",
    "dropped": "Ends of requests that could not be written",
    "refused": "Requests answered 503 because the server did not answer in time",
}


class StoreMetrics(Collector):
    """`aegis:store_up`, `aegis:store_unwritten` and, per counter x, `aegis:store_x_total`; of all proxies together."""

    def __init__(self, membership: Membership, records: Recorder) -> None:
        self._membership = membership
        self._records = records

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, from any thread."""
        up = float(self._membership.up.is_set())
        yield GaugeMetricFamily("aegis:store_up", "Proxies that can use the metadata store", value=up)
        yield GaugeMetricFamily(
            "aegis:store_unwritten", "Requests of which something is not written yet", value=self._records.unwritten
        )
        for name, value in msgspec.structs.asdict(self._records.counters).items():
            yield CounterMetricFamily(f"aegis:store_{name}", f"{_TOLD[name]}, since the start", value=value)
