"""The streams of a simulated instance: copies in order, each once what it waits for has passed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from aegis.core.copy_order import NOW, served, urgency
from aegis.core.effects import CopyBlocks, LoadWeights, StreamName, WipePages
from aegis.core.events import Progress
from aegis.core.ids import ModelId
from aegis.core.request import EventHandle
from aegis.sim.flows import Flow, Link
from aegis.sim.words import Words

_NAMES: Final = tuple(StreamName)


class Copy:
    """One of a stream. `model` is that of weights, "" of KV."""

    __slots__ = ("after", "event", "flow", "model", "nbytes", "stream", "urgency")

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
        self.flow: Flow | None = None


class Streams:
    """A copy is as urgent as the most urgent one behind it in its stream. `done` is called when one has ended: its word
    says so then, and the next one of its stream has begun."""

    __slots__ = ("_completed", "_done", "_links", "_queues", "_words")

    def __init__(self, words: Words, *, to_device: Link, to_host: Link, done: Callable[[Copy], None]) -> None:
        self._words = words
        self._links = dict.fromkeys(StreamName, to_device) | {StreamName.SWAP_OUT: to_host}
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

    def abandon(self, event: EventHandle) -> None:
        """The rest of it is not copied."""
        for queue in self._queues.values():
            for copy in queue:
                if copy.event == event:
                    copy.nbytes = 0
                    if copy.flow:
                        self._links[copy.stream].stop(copy.flow)

    def _submit(self, copy: Copy) -> None:
        queue = self._queues[copy.stream]
        queue.append(copy)
        first = queue[0]
        if first is copy:
            self._start(copy)
        elif first.flow:
            self._links[copy.stream].hurry(first.flow, copy.urgency)

    def _start(self, copy: Copy) -> None:
        if copy.after is not None and not self._words.passed(copy.after):
            self._words.when(copy.after, lambda: self._start(copy))
            return
        own = served([behind.urgency for behind in self._queues[copy.stream]])
        copy.flow = self._links[copy.stream].start(copy.nbytes, lambda _: self._ended(copy), urgency=own)

    def _ended(self, copy: Copy) -> None:
        queue = self._queues[copy.stream]
        queue.popleft()
        self._completed[copy.stream] = copy.event.value
        self._words.signal(copy.event)
        if queue:
            self._start(queue[0])
        self._done(copy)
        copy.flow = None  # they know each other, and would be garbage of the kind that is costly to find
