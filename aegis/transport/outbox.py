"""Messages to instances, kept until an event has been dealt with and then sent in one batch for each instance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Protocol

from aegis.core.clock import Clock
from aegis.core.ids import InstanceId
from aegis.core.messages import ToInstance
from aegis.telemetry.decisions import DecisionLog


class Link(Protocol):
    """The link that sends them: a `Hub`."""

    def send(self, identity: str, messages: Sequence[object]) -> None: ...


class Placeholder:
    """A place in line for a message that is not known yet."""

    __slots__ = ("instance", "message")

    def __init__(self, instance: InstanceId) -> None:
        self.instance = instance
        self.message: ToInstance | None = None


class Outbox:
    """`identity` names the process of an instance; `decisions` log the messages, if given."""

    def __init__(
        self, link: Link, identity: Callable[[InstanceId], str], clock: Clock, decisions: DecisionLog | None
    ) -> None:
        self._link = link
        self._identity = identity
        self._clock = clock
        self._decisions = decisions
        self._messages: defaultdict[InstanceId, list[ToInstance | Placeholder]] = defaultdict(list)

    def put(self, instance: InstanceId, *messages: ToInstance) -> None:
        self._messages[instance] += messages
        if self._decisions:
            for message in messages:
                self._decisions.sent(instance, message, self._clock.now_ns())

    def reserve(self, instance: InstanceId) -> Placeholder:
        """Messages that are put after it wait until it is filled."""
        placeholder = Placeholder(instance)
        self._messages[instance].append(placeholder)
        return placeholder

    def fill(self, placeholder: Placeholder, message: ToInstance) -> None:
        placeholder.message = message
        if self._decisions:
            self._decisions.sent(placeholder.instance, message, self._clock.now_ns())

    def forget(self, instance: InstanceId) -> None:
        """Its process is gone."""
        self._messages.pop(instance, None)

    def flush(self) -> None:
        for instance, messages in list(self._messages.items()):
            if messages:
                ready = _ready(messages)
                if len(ready) == len(messages):
                    del self._messages[instance]
                else:
                    self._messages[instance] = messages[len(ready) :]
                if ready:
                    self._link.send(self._identity(instance), ready)


def _ready(messages: Sequence[ToInstance | Placeholder]) -> list[ToInstance]:
    """The messages before the first one that is not known yet."""
    ready: list[ToInstance] = []
    for each in messages:
        message = each.message if isinstance(each, Placeholder) else each
        if message is None:
            break
        ready.append(message)
    return ready
