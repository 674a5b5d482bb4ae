"""Metrics of a node for Prometheus: its instances, and what switching models adds."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, disable_created_metrics

from aegis.core.clock import NS_PER_S
from aegis.core.ids import InstanceId
from aegis.core.messages import SwitchDone, Telemetry
from aegis.telemetry.metrics.instances import InstanceMetrics
from aegis.telemetry.metrics.moves import MoveMetrics
from aegis.telemetry.metrics.seconds import SecondsByLabel
from aegis.telemetry.metrics.work import WorkMetrics

_SWITCH_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class NodeMetrics:
    """The metrics that are not about requests. The node's memory and state are registered besides."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._instances = InstanceMetrics()
        self.registry.register(self._instances)
        self.work = WorkMetrics()
        self.registry.register(self.work)
        self.moves = MoveMetrics(self.registry)
        ProcessCollector(registry=self.registry)
        self._switches = Counter(
            "aegis:model_switches",
            "Times a model became the running one",
            ("model_name", "prefetched"),
            registry=self.registry,
        )
        self._switch_time = SecondsByLabel(
            "aegis:model_switch_seconds",
            "Time of a model switch by phase",
            "phase",
            _SWITCH_S,
            registry=self.registry,
        )

    def switch(self, done: SwitchDone) -> None:
        phases = {"make_room": done.make_room_ns, "copy": done.copy_ns, "kv": done.kv_ns}
        for phase, duration_ns in phases.items():
            self._switch_time.of(phase).observe(duration_ns / NS_PER_S)
        self._switches.labels(done.model, str(done.prefetched).lower()).inc()

    def telemetry(self, instance: InstanceId, report: Telemetry) -> None:
        self._instances.report(instance, report)

    def up(self, instance: InstanceId, is_up: bool) -> None:
        self._instances.set_up(instance, is_up)

    def removed(self, instance: InstanceId) -> None:
        self._instances.removed(instance)
        self.work.removed(instance)

    def ended(self, instance: InstanceId, *, requested: bool) -> None:
        """The instance has no process; it gets a new one, unless its end was requested."""
        self._instances.ended(instance, requested=requested)
