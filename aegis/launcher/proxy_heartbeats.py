"""Which proxies hang although their processes exist: stopped, or stuck for ever.

Plain values in, plain values out; no clock, no I/O. A proxy says something several times a second. One that has said
nothing for `SILENT_NS` is lost if its main thread has not used the processor either: it is stopped, or waits for what
will not come. One that works is merely busy, or gets too little of a processor, and has `BUSY_NS`. While the watcher
itself stands still nobody's time passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aegis.core.clock import NS_PER_MS
from aegis.core.ids import ProxyId

LOOK_NS = 250 * NS_PER_MS
"""From one look to the next."""

SILENT_NS = 1500 * NS_PER_MS
BUSY_NS = 60_000 * NS_PER_MS
_PAUSE_NS = 4 * LOOK_NS
"""With so long between two looks the watcher stood still."""


@dataclass(slots=True)
class _Life:
    heard_ns: int
    moved_ns: int  # when it was last heard, or seen to work
    used_ns: int = 0


class Silence:
    """All proxies of one node but its own."""

    def __init__(self) -> None:
        self._lives: dict[ProxyId, _Life] = {}
        self._looked_ns = 0

    def heard(self, proxy: ProxyId, now_ns: int) -> None:
        life = self._lives.setdefault(proxy, _Life(now_ns, now_ns))
        life.heard_ns = life.moved_ns = now_ns

    def left(self, proxy: ProxyId) -> None:
        """Its process is gone."""
        self._lives.pop(proxy, None)

    def looked(self, used_ns: Mapping[ProxyId, int], now_ns: int) -> list[ProxyId]:
        """Takes the processor time that each main thread has used since its start; returns who hangs."""
        paused = now_ns - self._looked_ns >= _PAUSE_NS
        self._looked_ns = now_ns
        for proxy, life in self._lives.items():
            used = used_ns.get(proxy, life.used_ns)
            if paused:
                life.heard_ns = now_ns
            if paused or used != life.used_ns:
                life.moved_ns = now_ns
            life.used_ns = used
        return sorted(
            proxy
            for proxy, life in self._lives.items()
            if now_ns - life.moved_ns >= SILENT_NS or now_ns - life.heard_ns >= BUSY_NS
        )
