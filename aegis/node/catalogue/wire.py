"""What the catalogue says, and to whom."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from aegis.core.ids import InstanceId
from aegis.core.messages import ToInstance
from aegis.transport.node_messages import Registering
from proxy.routing.events import ModelAway, ModelRemoved, ModelUp, SloSet


class Wire(Protocol):
    """The node, as the catalogue needs it."""

    @property
    def up(self) -> Collection[InstanceId]: ...

    def notify_proxies(self, event: ModelUp | ModelAway | ModelRemoved | SloSet | Registering) -> None:
        """To every proxy."""
        ...

    def broadcast(self, message: ToInstance) -> None:
        """To every instance that is up."""
        ...

    def post(self, instance: InstanceId, message: ToInstance) -> None:
        """To one of them."""
        ...
