"""Puts together what a node's watchers see."""

from __future__ import annotations

import time

import aegis
from aegis.core.ids import InstanceId, ModelId
from aegis.core.role import Role
from aegis.node.node import Node
from aegis.telemetry.live_view import Live, LiveInstance, LiveModel, SeenUntil, updates_since
from aegis.telemetry.memory_report import MemoryReport
from aegis.telemetry.model_counts import Tally


class LiveViewBuilder:
    """The live view of one start of a node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._start = time.time_ns()
        self._seats: dict[ModelId, int] = {}

    def live(self, seen: SeenUntil, memory: MemoryReport) -> Live:
        """`seen` is from an earlier one."""
        node = self._node
        states = node.pool.states()
        return Live(
            start=self._start,
            version=aegis.__version__,
            policy=node.policy,
            now_ns=node.clock.now_ns(),
            instances=[self._instance(name, role, states[name]) for name, role in node.pool.roles().items()],
            models=self._models(),
            memory=memory,
            news=updates_since(node.history, seen),
        )

    def _instance(self, name: InstanceId, role: Role, state: str) -> LiveInstance:
        said, device = self._node.reports.get(name), self._node.devices.device_of(name)
        if said is None:
            return LiveInstance(name, role, device, state)
        return LiveInstance(
            name, role, device, state, said.running_model, said.queued, said.running, said.resident, said.loading
        )

    def _models(self) -> list[LiveModel]:
        tallies = self._node.proxies.tallies()
        return [
            LiveModel(
                self._seats.setdefault(model.spec.model, len(self._seats)),
                model.state,
                model.weights,
                tallies.get(model.spec.model) or Tally(model.spec.model),
                generates=model.spec.manifest.pooling is None,
            )
            for model in self._node.catalogue.models().values()
        ]
