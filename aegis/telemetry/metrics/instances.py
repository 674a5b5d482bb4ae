"""Reports of instances as metrics: their counters added up over restarts, their gauges as they are."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from aegis.core.ids import InstanceId
from aegis.core.messages import SlabsOfShape, Telemetry
from aegis.telemetry.memory_report import fragmentation

_SWAP = re.compile(r"^(?:kv_)?swap_(in|out)_bytes_total$")
_INITIALISATIONS = "engine_initialisations_total"


@dataclass(slots=True)
class _Instance:
    up: bool = False
    restarts: int = 0
    totals: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    process: dict[str, int] = field(default_factory=dict)  # counters as this process last reported them
    gauges: dict[str, int] = field(default_factory=dict)
    shapes: tuple[SlabsOfShape, ...] = ()
    accounts: dict[str, int] = field(default_factory=dict)
    fragmentation: dict[str, float] = field(default_factory=dict)  # of its KV slabs, by region


class InstanceMetrics(Collector):
    """Counter `x_total` is shown as `aegis:instance_x_total{instance}`, KV swap bytes by direction, engine
    initialisations under their own name; account `y` as the gauge `aegis:memory_y{instance}`. The share of its KV slabs
    that holds no block is `aegis:kv_slab_fragmentation_ratio{instance, region}`; of each shape, told apart by the bytes
    of a block, there are `aegis:kv_slab_bytes` and `aegis:kv_blocks{…, state}`."""

    def __init__(self) -> None:
        self._instances: dict[InstanceId, _Instance] = {}

    def report(self, instance: InstanceId, telemetry: Telemetry) -> None:
        at = self._at(instance)
        for name, value in telemetry.counters.items():
            at.totals[name] += value - at.process.get(name, 0)
        at.process = dict(telemetry.counters)
        at.accounts, at.shapes = dict(telemetry.accounts), telemetry.shapes
        at.fragmentation = {
            region: fragmentation(use for use in telemetry.shapes if use.region == region)
            for region in ("device", "host")
        }
        at.gauges = {
            "queued": telemetry.queued,
            "running": telemetry.running,
            "resident_models": len(telemetry.resident),
            "lanes": telemetry.lanes,
        }

    def set_up(self, instance: InstanceId, up: bool) -> None:
        self._at(instance).up = up

    def removed(self, instance: InstanceId) -> None:
        """There is none of that name any more, nor will there be."""
        self._instances.pop(instance, None)

    def ended(self, instance: InstanceId, *, requested: bool) -> None:
        """The counters of its next process begin at 0, its memory empty. Restarts are those that nobody asked for."""
        at = self._at(instance)
        at.up = False
        at.restarts += not requested
        at.process, at.gauges, at.accounts, at.fragmentation, at.shapes = {}, {}, {}, {}, ()

    def _at(self, instance: InstanceId) -> _Instance:
        return self._instances.setdefault(instance, _Instance())

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, from any thread."""
        families: dict[str, Metric] = {}
        for name, at in sorted(dict(self._instances).items()):
            _gauge(families, "aegis:instance_up", {"instance": name}, at.up)
            _counter(families, "aegis:instance_restarts", {"instance": name}, at.restarts)
            for gauge, value in at.gauges.items():
                _gauge(families, f"aegis:instance_{gauge}", {"instance": name}, value)
            for account, value in at.accounts.items():
                _gauge(families, f"aegis:memory_{account}", {"instance": name}, value)
            for region, share in at.fragmentation.items():
                _gauge(families, "aegis:kv_slab_fragmentation_ratio", {"instance": name, "region": region}, share)
            for use in at.shapes:
                _slabs(families, name, use)
            for counter, value in dict(at.totals).items():
                _total(families, counter, name, value)
        yield from families.values()


def _total(families: dict[str, Metric], counter: str, instance: str, value: int) -> None:
    swap = _SWAP.match(counter)
    if swap:
        _counter(families, "aegis:kv_swap_bytes", {"instance": instance, "direction": swap[1]}, value)
    elif counter == _INITIALISATIONS:
        _counter(families, "aegis:engine_initialisations", {"instance": instance}, value)
    else:
        _counter(families, f"aegis:instance_{counter.removesuffix('_total')}", {"instance": instance}, value)


def _slabs(families: dict[str, Metric], instance: InstanceId, use: SlabsOfShape) -> None:
    labels = {"instance": str(instance), "region": use.region, "block_bytes": str(use.block_bytes)}
    blocks = {
        "free": use.free_blocks,
        "reserved": use.reserved_blocks,
        "used": use.used_blocks,
        "moving": use.moving_blocks,
    }
    _gauge(families, "aegis:kv_slab_bytes", labels, use.slabs * use.slab_bytes)
    for state, count in blocks.items():
        _gauge(families, "aegis:kv_blocks", labels | {"state": state}, count)


def _counter(families: dict[str, Metric], name: str, labels: dict[str, str], value: int) -> None:
    family = families.setdefault(
        name, CounterMetricFamily(name, f"{_words(name)}, since the start", labels=list(labels))
    )
    assert isinstance(family, CounterMetricFamily)
    family.add_metric(list(labels.values()), value)


def _gauge(families: dict[str, Metric], name: str, labels: dict[str, str], value: float) -> None:
    family = families.setdefault(name, GaugeMetricFamily(name, f"{_words(name)}, now", labels=list(labels)))
    assert isinstance(family, GaugeMetricFamily)
    family.add_metric(list(labels.values()), value)


def _words(name: str) -> str:
    return name.removeprefix("aegis:").replace("_", " ").capitalize()
