"""Changes the role of instances between prefill and decode: as `proxy.routing.roles` decides, or as users command."""

from __future__ import annotations

import asyncio
import logging

from aegis.control.messages import SetRole
from aegis.core.clock import Clock
from aegis.core.errors import UserError
from aegis.core.ids import InstanceId
from aegis.core.role import Role
from aegis.node.control_commands import NodeControl
from aegis.node.node import Node
from aegis.telemetry.logs import log
from aegis.telemetry.spans import SpanKind
from proxy.routing.roles import LoadsSampled, RoleChange, RoleChanged, RoleLoad, RolePolicy
from proxy.routing.router import Router

_LOOK_S = 1.0
_CHANGED_WITHIN_S = 600.0
_logger = logging.getLogger(__name__)


class RoleShift:
    """`router` is that of the proxy in the node's process, which is told of the others' requests."""

    def __init__(self, node: Node, router: Router, control: NodeControl, clock: Clock) -> None:
        self._node = node
        self._router = router
        self._control = control
        self._clock = clock
        self._policy = RolePolicy()

    async def run(self) -> None:
        """Runs until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for change in self._policy.on(self._sample(), self._clock.now_ns()):
                await self._change(change)
                self._policy.on(RoleChanged(), self._clock.now_ns())

    def _sample(self) -> LoadsSampled:
        serving, loads = self._node.pool.staying(), self._router.load_ppm()
        if serving.keys() != loads.keys():
            return LoadsSampled(())
        return LoadsSampled(
            tuple(RoleLoad(name, role, loads[name], self._worked_ns(name, role)) for name, role in serving.items())
        )

    def _worked_ns(self, name: InstanceId, role: Role) -> int:
        if role is not Role.PREFILL:
            return 0
        return self._node.metrics.work.worked_ns(name, SpanKind.PREFILL, SpanKind.SWITCH)

    async def _change(self, change: RoleChange) -> None:
        told = {"instance": change.instance, "role": change.role, "why": change.why}
        log(_logger, logging.WARNING, "instance changes its role", told)
        try:
            await self._control.do(change.instance, SetRole(change.role, _CHANGED_WITHIN_S))
        except UserError as error:
            log(_logger, logging.WARNING, "change of role is not done", told | {"why": error.message})
        else:
            log(_logger, logging.INFO, "change of role is done", told)
