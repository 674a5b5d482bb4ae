"""Finds instances that are dead although their processes exist: stopped, hung, or on a host that is gone.

`on(event, now_ns) -> effects`; no clock, no I/O. An instance counts as dead when it fails both of these checks:

1. Its heartbeats over MQTT stop, or say that its main loop does not run, for `OVERDUE_NS`. Then, or at once if the
   broker publishes its last will, it is asked over its own link, which does not depend on the broker.
2. For `PATIENCE_NS` it does not answer that either.

The time of the first check passes only while the launcher's own heartbeats come back from the broker. While the broker
is away, refuses or is slow, that time stands still, so silence of the broker is never taken for silence of an instance;
and an instance that the broker has shut out goes on answering the second check. After a pause of the broker every
instance has its whole time again, because clients come back in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from aegis.core.clock import NS_PER_MS
from aegis.core.ids import InstanceId

HEARTBEAT_NS = 500 * NS_PER_MS
"""From one of an instance to the next."""

ECHO_NS = 250 * NS_PER_MS
"""From one beat of the launcher to the next."""

PAUSE_NS = 3 * ECHO_NS
"""With so long between two echoes the broker was away."""

OVERDUE_NS = 1000 * NS_PER_MS
PATIENCE_NS = 750 * NS_PER_MS
_ASKED_AGAIN_NS = 1000 * NS_PER_MS


class OwnHeartbeatReceived(Struct, frozen=True):
    """A beat of the launcher's own came back from the broker."""


class HeartbeatReceived(Struct, frozen=True):
    """A heartbeat; `progress` grows while the main loop gets on."""

    instance: InstanceId
    incarnation: int
    progress: int


class ConnectionLost(Struct, frozen=True):
    """The broker says that the instance's connection broke."""

    instance: InstanceId
    incarnation: int


class ProbeAnswered(Struct, frozen=True):
    """The instance's main loop has answered over its own link."""

    instance: InstanceId


class Ended(Struct, frozen=True):
    """The instance's process is gone."""

    instance: InstanceId


Event = OwnHeartbeatReceived | HeartbeatReceived | ConnectionLost | ProbeAnswered | Ended


class Probe(Struct, frozen=True):
    """Over the instance's own link; answered by `ProbeAnswered`, if at all."""

    instance: InstanceId


class Fence(Struct, frozen=True):
    """Make sure that this incarnation does nothing any more."""

    instance: InstanceId
    incarnation: int
    why: str


Effect = Probe | Fence


@dataclass(slots=True)
class _Liveness:
    """Times are the broker's but for `probed_ns`, the last question that has no answer."""

    incarnation: int
    seen_ns: int
    moved_ns: int
    progress: int
    parted: bool = False
    probed_ns: int | None = None
    probe_again_ns: int = 0
    fenced: bool = False  # its later messages do not count


class FailureDetector:
    """All instances of one launcher. One is judged from its first heartbeat on."""

    def __init__(self) -> None:
        self._liveness: dict[InstanceId, _Liveness] = {}
        self._broker_ns = 0
        self._own_heartbeat_ns: int | None = None

    def on(self, event: Event, now_ns: int) -> list[Effect]:
        """Takes one event; returns what to do, in order."""
        match event:
            case OwnHeartbeatReceived():
                return self._on_own_heartbeat(now_ns)
            case HeartbeatReceived(instance, incarnation, progress):
                self._on_heartbeat(instance, incarnation, progress)
            case ConnectionLost(instance, incarnation):
                life = self._liveness.get(instance)
                if life and life.incarnation == incarnation:
                    life.parted = True
            case ProbeAnswered(instance):
                if instance in self._liveness:
                    self._on_answer(self._liveness[instance])
            case Ended(instance):
                self._liveness.pop(instance, None)
        return []

    def _on_heartbeat(self, instance: InstanceId, incarnation: int, progress: int) -> None:
        life = self._liveness.get(instance)
        if life is None or life.incarnation < incarnation:
            self._liveness[instance] = _Liveness(incarnation, self._broker_ns, self._broker_ns, progress)
        elif life.incarnation == incarnation:
            life.seen_ns, life.parted = self._broker_ns, False
            if progress != life.progress:
                life.progress, life.moved_ns, life.probed_ns = progress, self._broker_ns, None

    def _on_answer(self, life: _Liveness) -> None:
        """The instance lives, whatever the broker says of it. If the broker goes on, the instance is asked again."""
        life.probed_ns, life.parted = None, False
        life.seen_ns = life.moved_ns = max(life.seen_ns, self._broker_ns - OVERDUE_NS)

    def _on_own_heartbeat(self, now_ns: int) -> list[Effect]:
        since_ns = now_ns - self._own_heartbeat_ns if self._own_heartbeat_ns is not None else PAUSE_NS
        self._own_heartbeat_ns = now_ns
        if since_ns >= PAUSE_NS:
            for life in self._liveness.values():
                life.seen_ns = life.moved_ns = self._broker_ns
                life.probed_ns, life.parted = None, False
            return []
        self._broker_ns += since_ns
        effects: list[Effect] = []
        for instance, life in sorted(self._liveness.items()):
            if not life.fenced:
                effects += self._check(instance, life, now_ns)
        return effects

    def _check(self, instance: InstanceId, life: _Liveness, now_ns: int) -> list[Effect]:
        silent_ns, stuck_ns = self._broker_ns - life.seen_ns, self._broker_ns - life.moved_ns
        if not life.parted and stuck_ns < OVERDUE_NS:
            life.probed_ns = None
            return []
        if life.probed_ns is None:
            if now_ns < life.probe_again_ns:
                return []
            life.probed_ns, life.probe_again_ns = now_ns, now_ns + _ASKED_AGAIN_NS
            return [Probe(instance)]
        if now_ns - life.probed_ns < PATIENCE_NS or stuck_ns < OVERDUE_NS:
            return []
        life.fenced = True
        why = "no sign of life" if silent_ns >= OVERDUE_NS else "its main loop, or one of its lanes, does not get on"
        return [Fence(instance, life.incarnation, why)]
