"""The state of a server as metrics: its instances, models, proxies, host memory and bus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from msgspec import Struct
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from aegis.core.ids import InstanceId
from aegis.core.role import Role


class ServerState(Struct, frozen=True):
    """The state at one moment. `instances` have a role and a state, `models` a state each; `host_kv_bytes` are by
    state, too."""

    instances: Mapping[InstanceId, tuple[Role, str]]
    models: tuple[str, ...]
    proxies: int
    host_kv_bytes: Mapping[str, int]
    bus_up: bool


class ServerStateMetrics(Collector):
    """`aegis:instance_state{instance, role, state}`, 1 for the state that it is in, `aegis:models{state}`,
    `aegis:proxies`, `aegis:host_kv_bytes{state}`, `aegis:bus_up`, and `aegis:build_info`, which bears `labels`."""

    def __init__(self, state: Callable[[], ServerState], labels: Mapping[str, str]) -> None:
        self._state = state
        self._labels = dict(labels)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, from any thread."""
        now = self._state()
        yield InfoMetricFamily("aegis:build", "What serves", value=self._labels)
        states = GaugeMetricFamily(
            "aegis:instance_state", "The state an instance is in", labels=["instance", "role", "state"]
        )
        for instance, (role, state) in now.instances.items():
            states.add_metric([instance, role, state], 1)
        models = GaugeMetricFamily("aegis:models", "Models, by state", labels=["state"])
        for state, count in sorted(Counter(now.models).items()):
            models.add_metric([state], count)
        host = GaugeMetricFamily("aegis:host_kv_bytes", "Host memory for KV, by state", labels=["state"])
        for state, nbytes in now.host_kv_bytes.items():
            host.add_metric([state], nbytes)
        yield from (states, models, host)
        yield GaugeMetricFamily("aegis:proxies", "Proxies that joined", value=now.proxies)
        yield GaugeMetricFamily("aegis:bus_up", "Whether the node is connected to the MQTT broker", value=now.bus_up)
