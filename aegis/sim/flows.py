"""Copies share what they go over: each GPU's link, one way and the other, and the host's memory bus.

Of the copies of one direction of a link the most urgent get equal shares of it, the others wait. Where all the links
in use want more than the bus has, they get equal shares of the bus, as hardware deals it out: processor sharing,
work-conserving, in integers.

A copy may be helped by the links of other devices: they carry parts of it, each as fast as its share of its own link
allows, and last of all that goes over that. Host links are shared in the same way whatever is carried over them.
"""

from __future__ import annotations

from collections.abc import Callable

from aegis.core.clock import NS_PER_S
from aegis.core.copy_order import FOR_PEERS, NOW, served
from aegis.sim.event_queue import EventQueue


class Flow:
    """A copy under way. What is left is counted in bytes times 10⁹, so that a rate in bytes/s times nanoseconds is
    exact. Links that help carry `helped` bytes/s of it."""

    __slots__ = ("done", "helped", "helpers", "left", "link", "started_ns", "urgency")

    def __init__(self, link: Link, nbytes: int, done: Callable[[Flow], None], now_ns: int, urgency: int) -> None:
        self.link = link
        self.left = nbytes * NS_PER_S
        self.done = done
        self.started_ns = now_ns
        self.urgency = urgency
        self.helped = 0
        self.helpers: list[Help] = []


class Help(Flow):
    """The part of a flow that another link carries; it ends with the flow. `bytes_per_s_max` is how fast it can go on
    from there."""

    __slots__ = ("bytes_per_s", "bytes_per_s_max", "helps")

    def __init__(self, link: Link, helps: Flow, bytes_per_s_max: int, now_ns: int) -> None:
        super().__init__(link, 0, helps.done, now_ns, FOR_PEERS)
        self.helps = helps
        self.bytes_per_s = 0
        self.bytes_per_s_max = bytes_per_s_max


class Bus:
    """A node's memory bus. `bytes_per_s` 0: no limit."""

    __slots__ = ("_busy", "agenda", "bytes_per_s")

    def __init__(self, agenda: EventQueue, bytes_per_s: int) -> None:
        self.agenda = agenda
        self.bytes_per_s = bytes_per_s
        self._busy: dict[Link, None] = {}  # in order

    def share(self, link: Link) -> int:
        """The share that a busy link gets."""
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
    """One direction of a GPU's link to the host. `overhead_ns` is what a copy takes whatever its size. Where `equal`,
    all copies share the link, whatever their urgency."""

    __slots__ = (
        "_equal",
        "_helps",
        "_rate",
        "_served",
        "_since_ns",
        "_version",
        "bus",
        "bytes_per_s",
        "flows",
        "overhead_ns",
    )

    def __init__(self, bus: Bus, bytes_per_s: int, *, overhead_ns: int = 0, equal: bool = False) -> None:
        self.bus = bus
        self.bytes_per_s = bytes_per_s
        self.overhead_ns = overhead_ns
        self.flows: list[Flow] = []
        self._equal = equal
        self._helps = 0  # flows that are helped here, or help elsewhere
        self._served: list[Flow] = []  # those that move bytes
        self._rate = 0  # of each of them
        self._since_ns = 0  # the rest of a flow is its rest at this time
        self._version = 0  # of the rate: an end that was scheduled at another one finds so

    def start(self, nbytes: int, done: Callable[[Flow], None], *, urgency: int = NOW) -> Flow:
        """`done` is called when the last byte has arrived."""
        agenda = self.bus.agenda
        flow = Flow(self, nbytes, done, agenda.now_ns, NOW if self._equal else urgency)
        if self.overhead_ns:
            agenda.at(agenda.now_ns + self.overhead_ns, self._enter, flow)
        else:
            self._enter(flow)
        return flow

    def help(self, flow: Flow, bytes_per_s_max: int) -> None:
        """From now on this link carries a part of another one's flow, until that has ended."""
        agenda = self.bus.agenda
        if flow.left <= 0:
            return
        if flow not in flow.link.flows:
            agenda.at(agenda.now_ns + flow.link.overhead_ns, self.help, flow, bytes_per_s_max)
            return
        helping = Help(self, flow, bytes_per_s_max, agenda.now_ns)
        if not flow.helpers:
            flow.link._helps += 1
        flow.helpers.append(helping)
        self._helps += 1
        self._enter(helping)

    def stop(self, flow: Flow) -> None:
        """The rest of it is not copied."""
        flow.left = 0
        flow.urgency = NOW
        if flow in self.flows:
            self._choose()
            self.reshare()

    def hurry(self, flow: Flow, urgency: int) -> None:
        """The flow is as urgent as that from now on, unless it was more urgent already."""
        if self._equal or urgency >= flow.urgency:
            return
        flow.urgency = urgency
        if flow in self.flows:
            self._choose()
            self.reshare()

    def reshare(self) -> None:
        """Goes on with a new rate for each flow that is served, until the first of them ends."""
        self._advance()
        agenda, rate = self.bus.agenda, self.bus.share(self) // len(self._served) or 1
        self._rate = rate
        if self._helps:
            self._pass_on(rate)
            self._reschedule()
            return
        self._version += 1
        left_ns = [-(-flow.left // rate) if flow.left > 0 else 0 for flow in self._served]
        soonest_ns = min(left_ns)
        agenda.at(agenda.now_ns + soonest_ns, self._finish, self._served[left_ns.index(soonest_ns)], self._version)

    def _pass_on(self, rate: int) -> None:
        """What is helped from here goes faster now, or slower."""
        for flow in self.flows:
            if isinstance(flow, Help):
                own = min(rate, flow.bytes_per_s_max) if flow in self._served else 0
                if own != flow.bytes_per_s:
                    helped = flow.helps
                    helped.link._advance()
                    helped.helped += own - flow.bytes_per_s
                    flow.bytes_per_s = own
                    helped.link._reschedule()

    def _reschedule(self) -> None:
        """The first flow to end does so, where some are helped."""
        self._version += 1
        agenda, soonest_ns, first = self.bus.agenda, -1, None
        for flow in self.flows:
            rate = (self._rate if flow in self._served else 0) + flow.helped
            if isinstance(flow, Help) or not (rate or flow.left <= 0):
                continue
            left_ns = -(-flow.left // rate) if flow.left > 0 else 0
            if first is None or left_ns < soonest_ns:
                soonest_ns, first = left_ns, flow
        if first is not None:
            agenda.at(agenda.now_ns + soonest_ns, self._finish, first, self._version)

    def _advance(self) -> None:
        now_ns = self.bus.agenda.now_ns
        elapsed_ns = now_ns - self._since_ns
        copied = self._rate * elapsed_ns
        self._since_ns = now_ns
        for flow in self._served:
            flow.left -= copied
        if self._helps:
            for flow in self.flows:
                flow.left -= flow.helped * elapsed_ns

    def _choose(self) -> None:
        self._advance()
        if len(self.flows) <= 1:
            self._served = self.flows.copy()
            return
        now = served([flow.urgency for flow in self.flows])
        self._served = [flow for flow in self.flows if flow.urgency == now]

    def _enter(self, flow: Flow) -> None:
        self.flows.append(flow)
        self._choose()
        if len(self.flows) == 1:
            self.bus.changed(self)
        self.reshare()

    def _finish(self, flow: Flow, version: int) -> None:
        if version != self._version:
            return
        self._leave(flow)
        for helping in flow.helpers:
            helping.link._helps -= 1
            helping.link._leave(helping)
        flow.done(flow)

    def _leave(self, flow: Flow) -> None:
        self._version += 1
        flow.left = 0
        self.flows.remove(flow)
        self._choose()
        if flow.helpers:
            self._helps -= 1
        if not self.flows:
            self.bus.changed(self)
        else:
            self.reshare()
