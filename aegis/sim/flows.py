"""Copies share what they go over: each GPU's link, one way and the other, and the host's memory bus.

Copies of one direction of a link get equal shares of it. Where all the links in use want more than the bus has, they
get equal shares of the bus: processor sharing, work-conserving, in integers.
"""

from __future__ import annotations

from collections.abc import Callable

from aegis.core.clock import NS_PER_S
from aegis.sim.heap import Heap


class Flow:
    """A copy under way. What is left is counted in bytes times 10⁹, so that a rate in bytes/s times nanoseconds is
    exact."""

    __slots__ = ("done", "left", "link", "rate", "since_ns", "started_ns", "version")

    def __init__(self, link: Link, nbytes: int, done: Callable[[Flow], None], now_ns: int) -> None:
        self.link = link
        self.left = nbytes * NS_PER_S
        self.done = done
        self.rate = 0
        self.since_ns = self.started_ns = now_ns
        self.version = 0


class Bus:
    """A node's memory bus. `bytes_per_s` 0: as much as anybody wants."""

    __slots__ = ("_busy", "bytes_per_s", "heap")

    def __init__(self, heap: Heap, bytes_per_s: int) -> None:
        self.heap = heap
        self.bytes_per_s = bytes_per_s
        self._busy: dict[Link, None] = {}  # in order

    def share(self, link: Link) -> int:
        """What a busy link gets."""
        if self.bytes_per_s and link.bytes_per_s * len(self._busy) > self.bytes_per_s:
            return self.bytes_per_s // len(self._busy)
        return link.bytes_per_s

    def changed(self, link: Link) -> None:
        """The link became busy or idle: others get less or more."""
        busy = len(self._busy)
        if link.flows:
            self._busy[link] = None
            busy += 1
        else:
            del self._busy[link]
        if self.bytes_per_s and link.bytes_per_s * busy > self.bytes_per_s:  # with the link
            for other in self._busy:
                if other is not link:
                    other.reshare()


class Link:
    """One direction of a GPU's link to the host. `overhead_ns` is what a copy takes whatever its size."""

    __slots__ = ("bus", "bytes_per_s", "flows", "overhead_ns")

    def __init__(self, bus: Bus, bytes_per_s: int, *, overhead_ns: int = 0) -> None:
        self.bus = bus
        self.bytes_per_s = bytes_per_s
        self.overhead_ns = overhead_ns
        self.flows: list[Flow] = []

    def start(self, nbytes: int, done: Callable[[Flow], None]) -> Flow:
        """`done` is called when the last byte has arrived."""
        heap = self.bus.heap
        flow = Flow(self, nbytes, done, heap.now_ns)
        heap.at(heap.now_ns + self.overhead_ns, self._enter, flow)
        return flow

    def stop(self, flow: Flow) -> None:
        """What is left of it is not copied."""
        flow.left = 0
        flow.version += 1
        if flow in self.flows:
            self.bus.heap.at(self.bus.heap.now_ns, self._finish, flow, flow.version)

    def reshare(self) -> None:
        """Goes on with a new rate for each flow."""
        heap = self.bus.heap
        now_ns, rate = heap.now_ns, self.bus.share(self) // len(self.flows) or 1
        for flow in self.flows:
            flow.left -= flow.rate * (now_ns - flow.since_ns)
            flow.rate, flow.since_ns = rate, now_ns
            flow.version += 1
            left_ns = -(-flow.left // rate) if flow.left > 0 else 0
            heap.at(now_ns + left_ns, self._finish, flow, flow.version)

    def _enter(self, flow: Flow) -> None:
        flow.since_ns = self.bus.heap.now_ns
        self.flows.append(flow)
        if len(self.flows) == 1:
            self.bus.changed(self)
        self.reshare()

    def _finish(self, flow: Flow, version: int) -> None:
        if version != flow.version:
            return
        flow.version = -1
        self.flows.remove(flow)
        if not self.flows:
            self.bus.changed(self)
        else:
            self.reshare()
        flow.done(flow)
