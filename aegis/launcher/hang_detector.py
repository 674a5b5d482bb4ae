"""Finds proxies that hang although their processes exist: stopped, or stuck for ever.

Plain values in, plain values out; no clock, no I/O. A proxy sends messages several times a second. A proxy without
messages for `SILENT_NS` is lost if its main thread has not used the processor either: it is stopped, or waits for an
event that will not come. A proxy that works is merely busy, or gets too little of a processor, and has `BUSY_NS`.
One that has not joined yet sends nothing, and may wait for a slow disk: it is lost when it does nothing for
`STARTING_NS`. While the watcher itself stands still, this time stands still, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aegis.core.clock import NS_PER_MS
from aegis.core.ids import ProxyId

LOOK_NS = 250 * NS_PER_MS
"""The interval between two looks."""

SILENT_NS = 1500 * NS_PER_MS
BUSY_NS = 60_000 * NS_PER_MS
STARTING_NS = 60_000 * NS_PER_MS
_PAUSE_NS = 4 * LOOK_NS
"""With so long between two looks the watcher stood still."""


@dataclass(slots=True)
class _Liveness:
    seen_ns: int
    moved_ns: int  # when it was last heard, or seen to work
    used_ns: int = 0
    joined: bool = False


class HangDetector:
    """All proxies of one node but its own."""

    def __init__(self) -> None:
        self._liveness: dict[ProxyId, _Liveness] = {}
        self._looked_ns = 0

    def started(self, proxy: ProxyId, now_ns: int) -> None:
        """The proxy's process was started. It is to join, and is not expected to say anything before."""
        self._liveness[proxy] = _Liveness(now_ns, now_ns)

    def saw_message(self, proxy: ProxyId, now_ns: int) -> None:
        life = self._liveness.setdefault(proxy, _Liveness(now_ns, now_ns))
        life.seen_ns = life.moved_ns = now_ns
        life.joined = True

    def forget(self, proxy: ProxyId) -> None:
        """The proxy's process is gone."""
        self._liveness.pop(proxy, None)

    def check(self, used_ns: Mapping[ProxyId, int], now_ns: int) -> list[ProxyId]:
        """Takes the processor time that each main thread has used since its start; returns the proxies that hang."""
        paused = now_ns - self._looked_ns >= _PAUSE_NS
        self._looked_ns = now_ns
        for proxy, life in self._liveness.items():
            used = used_ns.get(proxy, life.used_ns)
            if paused:
                life.seen_ns = now_ns
            if paused or used != life.used_ns:
                life.moved_ns = now_ns
            life.used_ns = used
        return sorted(
            proxy
            for proxy, life in self._liveness.items()
            if now_ns - life.moved_ns >= (SILENT_NS if life.joined else STARTING_NS)
            or (life.joined and now_ns - life.seen_ns >= BUSY_NS)
        )
