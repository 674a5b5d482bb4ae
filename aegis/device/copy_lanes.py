"""One direction of a device's link, as the copies of this process share it: the most urgent first.

A stream asks between two chunks whether a more urgent copy is in hand on another one, and waits while there is. A copy
is as urgent as the most urgent one behind it in its stream. What other processes copy on the same link is not seen: the
hardware shares the link out between them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Condition

from aegis.core.copy_order import served

_POLL_S = 0.02  # between looks at whether to give up


class CopyLane:
    """One direction, shared by the threads of its streams and the submitting thread."""

    __slots__ = ("changed", "copying")

    def __init__(self) -> None:
        self.changed = Condition()
        self.copying: list[Place] = []  # streams that move bytes, or would


class Place:
    """A stream's on its lane. Whatever is submitted ends, in order; a part of it is copied in between."""

    __slots__ = ("_lane", "_queued")

    def __init__(self, lane: CopyLane) -> None:
        self._lane = lane
        self._queued: deque[int] = deque()  # urgencies, of what is in hand first

    @property
    def urgency(self) -> int:
        return served(self._queued)

    def submitted(self, urgency: int) -> None:
        with self._lane.changed:
            self._queued.append(urgency)
            if self in self._lane.copying:
                self._lane.changed.notify_all()  # it may be more urgent now

    def begin(self) -> None:
        """The first copy in line has the lane from now on."""
        with self._lane.changed:
            self._lane.copying.append(self)

    def end(self) -> None:
        """The first copy in line is over, whether it copied or not."""
        with self._lane.changed:
            self._queued.popleft()
            if self in self._lane.copying:
                self._lane.copying.remove(self)
                self._lane.changed.notify_all()

    def wait(self, gave_up: Callable[[], bool]) -> None:
        """Waits, before each chunk, until no more urgent copy runs."""
        if len(self._lane.copying) == 1:
            return
        with self._lane.changed:
            while served([place.urgency for place in self._lane.copying]) < self.urgency and not gave_up():
                self._lane.changed.wait(_POLL_S)
