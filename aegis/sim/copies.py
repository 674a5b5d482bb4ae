"""The streams of a simulated instance: copies in order, each once what it waits for has passed.

Both simulated worlds queue their copies here. They differ in the carrier: over links of real rates copies share what
there is and take time (`Links`), where contents matter each takes what was drawn for it (`aegis.sim.faults.instance`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from aegis.core.copy_order import NOW, served, urgency
from aegis.core.effects import CopyBlocks, LoadWeights, StageImage, StreamName, WipePages
from aegis.core.events import Progress
from aegis.core.ids import ModelId
from aegis.core.request import EventHandle
from aegis.sim.flows import Flow, Link
from aegis.sim.timeline_semaphores import TimelineSemaphores

_NAMES: Final = tuple(StreamName)


class Copy:
    """One of a stream. `model` is that of weights, "" of KV. `started_ns` is set by the carrier. `helpers` are links of
    other devices that carry parts of it, each with what can go on from there in bytes/s."""

    __slots__ = ("after", "event", "helpers", "model", "nbytes", "started_ns", "stream", "urgency")

    def __init__(
        self,
        stream: StreamName,
        event: EventHandle,
        after: EventHandle | None,
        nbytes: int,
        model: ModelId,
        urgency: int,
    ) -> None:
        self.stream = stream
        self.event = event
        self.after = after
        self.nbytes = nbytes
        self.model = model
        self.urgency = urgency
        self.started_ns = 0
        self.helpers: list[tuple[Link, int]] = []


class Carrier(Protocol):
    """What moves bytes, or takes the time that this would take. Of each stream it has at most one copy at a time."""

    def start(self, copy: Copy, urgency: int, ended: Callable[[Copy], None]) -> None:
        """`ended` is called when its last byte has arrived, never before this returns."""
        ...

    def hurry(self, stream: StreamName, urgency: int) -> None:
        """The stream's copy, if one is under way, is as urgent as that from now on, unless it was more so."""
        ...

    def stop(self, stream: StreamName) -> None:
        """What is left of the stream's copy, if one is under way, need not be copied."""
        ...

    def help(self, stream: StreamName, link: Link, bytes_per_s_max: int) -> None:
        """The link carries a part of the stream's copy, if one is under way."""
        ...


class Links:
    """A carrier of real rates: the two directions of a GPU's link."""

    __slots__ = ("_flows", "_links")

    def __init__(self, to_device: Link, to_host: Link) -> None:
        self._links = dict.fromkeys(StreamName, to_device) | {StreamName.SWAP_OUT: to_host}
        self._flows: dict[StreamName, Flow] = {}

    def start(self, copy: Copy, urgency: int, ended: Callable[[Copy], None]) -> None:
        def arrived(_: Flow) -> None:
            del self._flows[copy.stream]
            ended(copy)

        flow = self._flows[copy.stream] = self._links[copy.stream].start(copy.nbytes, arrived, urgency=urgency)
        copy.started_ns = flow.started_ns
        for link, bytes_per_s_max in copy.helpers:
            link.help(flow, bytes_per_s_max)

    def hurry(self, stream: StreamName, urgency: int) -> None:
        flow = self._flows.get(stream)
        if flow:
            self._links[stream].hurry(flow, urgency)

    def stop(self, stream: StreamName) -> None:
        flow = self._flows.get(stream)
        if flow:
            self._links[stream].stop(flow)

    def help(self, stream: StreamName, link: Link, bytes_per_s_max: int) -> None:
        flow = self._flows.get(stream)
        if flow:
            link.help(flow, bytes_per_s_max)


class Streams:
    """A copy is as urgent as the most urgent one behind it in its stream. `done` is called when one has ended: its
    semaphore says so then, and the next one of its stream has begun."""

    __slots__ = ("_carrier", "_completed", "_done", "_queues", "_semaphores")

    def __init__(self, semaphores: TimelineSemaphores, carrier: Carrier, *, done: Callable[[Copy], None]) -> None:
        self._semaphores = semaphores
        self._carrier = carrier
        self._queues: dict[StreamName, deque[Copy]] = {name: deque() for name in StreamName}
        self._completed: dict[StreamName, int] = {}  # and not told yet
        self._done = done

    @property
    def in_flight(self) -> bool:
        """Whether any copy has not ended, or not been told of."""
        return bool(self._completed) or any(self._queues.values())

    def progress(self) -> list[Progress]:
        """Completions on the streams since the last call."""
        if not self._completed:
            return []
        completed, self._completed = self._completed, {}
        return [Progress(name, completed[name]) for name in _NAMES if name in completed]

    def load(self, effect: LoadWeights, nbytes: int) -> None:
        self._submit(Copy(effect.stream, effect.event, None, nbytes, effect.model, urgency(effect.stream)))

    def copy(self, effect: CopyBlocks) -> None:
        nbytes = effect.shape.block_bytes * sum([count for _, _, count in effect.copies])
        own = urgency(effect.stream, ahead=effect.ahead)
        self._submit(Copy(effect.stream, effect.event, effect.after, nbytes, ModelId(""), own))

    def wipe(self, effect: WipePages) -> None:
        self._submit(Copy(StreamName.SCRUB, effect.event, None, 0, ModelId(""), NOW))

    def stage(self, effect: StageImage) -> None:
        """What is carried counts as its target's: this ends with that."""
        self._submit(Copy(StreamName.RELAY, effect.event, effect.load, 0, ModelId(""), urgency(StreamName.RELAY)))

    def help(self, event: EventHandle, link: Link, bytes_per_s_max: int) -> None:
        """The link of another device carries a part of this copy, unless that has ended."""
        for stream, queue in self._queues.items():
            for copy in queue:
                if copy.event == event:
                    copy.helpers.append((link, bytes_per_s_max))
                    if copy is queue[0]:
                        self._carrier.help(stream, link, bytes_per_s_max)

    def abandon(self, event: EventHandle) -> None:
        """The rest of it is not copied."""
        for stream, queue in self._queues.items():
            for copy in queue:
                if copy.event == event:
                    copy.nbytes = 0
                    if copy is queue[0]:
                        self._carrier.stop(stream)

    def _submit(self, copy: Copy) -> None:
        queue = self._queues[copy.stream]
        queue.append(copy)
        if queue[0] is copy:
            self._start(copy)
        else:
            self._carrier.hurry(copy.stream, copy.urgency)

    def _start(self, copy: Copy) -> None:
        if copy.after is not None and not self._semaphores.passed(copy.after):
            self._semaphores.when(copy.after, lambda: self._start(copy))
            return
        own = served([behind.urgency for behind in self._queues[copy.stream]])
        self._carrier.start(copy, own, self._ended)

    def _ended(self, copy: Copy) -> None:
        queue = self._queues[copy.stream]
        queue.popleft()
        self._completed[copy.stream] = copy.event.value
        self._semaphores.signal(copy.event)
        if queue:
            self._start(queue[0])
        self._done(copy)
