"""A server's state is shown as it is when it is asked for."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from aegis.core.ids import InstanceId
from aegis.core.role import Role
from aegis.telemetry.metrics.server_state import ServerState, ServerStateMetrics


def test_the_state_is_that_of_the_moment() -> None:
    now = [ServerState({InstanceId("mixed-0"): (Role.MIXED, "starting")}, ("ready", "ready"), 1, {"free": 8}, False)]
    registry = CollectorRegistry()
    registry.register(ServerStateMetrics(lambda: now[0], {"version": "1"}))
    value = registry.get_sample_value
    assert value("aegis:instance_state", {"instance": "mixed-0", "role": "mixed", "state": "starting"}) == 1
    assert value("aegis:build_info", {"version": "1"}) == 1
    assert value("aegis:models", {"state": "ready"}) == 2
    assert (value("aegis:bus_up"), value("aegis:host_kv_bytes", {"state": "free"})) == (0, 8)
    now[0] = ServerState({InstanceId("mixed-0"): (Role.MIXED, "up")}, (), 2, {}, True)
    assert value("aegis:instance_state", {"instance": "mixed-0", "role": "mixed", "state": "starting"}) is None
    assert value("aegis:instance_state", {"instance": "mixed-0", "role": "mixed", "state": "up"}) == 1
    assert (value("aegis:proxies"), value("aegis:bus_up")) == (2, 1)
