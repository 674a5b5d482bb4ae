"""The copies of an instance whose memory has contents: in the streams that both worlds have, each for a drawn time.

A copy reads its source and writes its target at its very end. One that is abandoned takes its whole time and does
nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from aegis.core.effects import AbandonLoad, CopyBlocks, LoadWeights, StreamName, WipePages
from aegis.core.events import LoadFailed, Progress
from aegis.core.ids import ModelId
from aegis.core.request import EventHandle
from aegis.sim.copies import Copy, Streams
from aegis.sim.faults.device_memory import DeviceMemory, pairs_of
from aegis.sim.faults.fake_models import PAGE
from aegis.sim.faults.state import Action, FaultWorldState
from aegis.sim.flows import Link


class Process(Protocol):
    """The instance whose copies they are."""

    alive: bool
    slowness: int

    def after(self, delay_ns: int, action: Action) -> None: ...

    def feed(self, event: Progress | LoadFailed) -> None: ...

    def note(self, what: object) -> None: ...


@dataclass(slots=True)
class _Content:
    duration_ns: int
    end: Action
    unreadable: ModelId | None = None  # this model's image, which it is a load of


class ContentCopies:
    """The copies of an instance, and the carrier of its streams: each stream has a path of its own, and all copies of a
    slow process are slow."""

    def __init__(self, state: FaultWorldState, process: Process, memory: DeviceMemory) -> None:
        self._state = state
        self._process = process
        self._memory = memory
        self._streams = Streams(state.semaphores, self, done=self._done)
        self._contents: dict[EventHandle, _Content] = {}

    # --- effects ------------------------------------------------------------------------------------------------------

    def load(self, effect: LoadWeights) -> None:
        draw, share = self._state.draw, self._state.unreadable_share
        pages, end = self._memory.load(effect)
        unreadable = effect.model if share and not effect.cached and draw.uniform() < share else None
        self._contents[effect.event] = _Content(200_000 * pages + draw.below(500_000), end, unreadable)
        self._streams.load(effect, pages * PAGE)

    def copy(self, effect: CopyBlocks) -> None:
        duration_ns = 20_000 * len(pairs_of(effect.copies)) + self._state.draw.below(3_000_000)
        self._contents[effect.event] = _Content(duration_ns, self._memory.copy(effect))
        self._streams.copy(effect)

    def wipe(self, effect: WipePages) -> None:
        self._contents[effect.event] = _Content(50_000, lambda: self._memory.wipe(effect.runs))
        self._streams.wipe(effect)

    def abandon(self, effect: AbandonLoad) -> None:
        content = self._contents.get(effect.event)
        if content:
            content.end, content.unreadable = _nothing, None

    # --- for its streams ----------------------------------------------------------------------------------------------

    def start(self, copy: Copy, urgency: int, ended: Callable[[Copy], None]) -> None:
        if not self._process.alive:
            return
        content = self._contents[copy.event]
        duration_ns = content.duration_ns * self._process.slowness
        if content.unreadable is not None:
            self._process.after(duration_ns // 2, lambda: self._fail(content))
        self._process.after(duration_ns, lambda: ended(copy))

    def hurry(self, stream: StreamName, urgency: int) -> None:
        """Nothing is shared."""

    def stop(self, stream: StreamName) -> None:
        """It takes its whole time."""

    def help(self, stream: StreamName, link: Link, bytes_per_s_max: int) -> None:
        """Nothing is shared."""

    def _fail(self, content: _Content) -> None:
        if content.unreadable is not None:
            content.end = _nothing
            self._process.note(f"cannot read {content.unreadable}")
            self._process.feed(LoadFailed(content.unreadable, "its image is damaged"))

    def _done(self, copy: Copy) -> None:
        self._contents.pop(copy.event).end()
        for progress in self._streams.progress():
            self._process.feed(progress)


def _nothing() -> None:
    pass
