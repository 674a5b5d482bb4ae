"""What is to be sent to instances when an event has been dealt with, in one batch for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from aegis.core.clock import Clock
from aegis.core.ids import InstanceId
from aegis.core.messages import ToInstance
from aegis.telemetry.decisions import DecisionLog


class Link(Protocol):
    """Where it goes: a `Hub`."""

    def send(self, identity: str, messages: Sequence[object]) -> None: ...


class Outbox:
    """`identity` names the process of an instance that is meant; `decisions` are told what was decided, if given."""

    def __init__(
        self, link: Link, identity: Callable[[InstanceId], str], clock: Clock, decisions: DecisionLog | None
    ) -> None:
        self._link = link
        self._identity = identity
        self._clock = clock
        self._decisions = decisions
        self._messages: defaultdict[InstanceId, list[ToInstance]] = defaultdict(list)

    def put(self, instance: InstanceId, *messages: ToInstance) -> None:
        self._messages[instance] += messages
        if self._decisions:
            for message in messages:
                self._decisions.told(instance, message, self._clock.now_ns())

    def forget(self, instance: InstanceId) -> None:
        """Its process is gone."""
        self._messages.pop(instance, None)

    def flush(self) -> None:
        for instance, messages in self._messages.items():
            if messages:
                self._link.send(self._identity(instance), messages)
        self._messages.clear()
