"""The layers of a prompt on a lane, launched a few at a time (MuxWise §3.2.3). Not run on a GPU.

A prompt's layers are launched faster than a GPU runs them. If all were, the GPU would have a queue that nothing can get
out of again, and the thread would hold the interpreter while the other lane's thread has a decode step to launch. So no
more than `ahead` layers lie before the GPU. MuxWise has one thread that launches both phases; it launches as many
layers as last one decode step and asks whether events have passed, since it must not wait for one phase with the
other's step to launch ("query-based synchronisation"). Here each lane has a thread, which may wait: it lets the
interpreter go meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

AHEAD = 2


class Event(Protocol):
    """An event of a GPU's stream."""

    def synchronize(self) -> None:
        """Returns when all that was launched before it has been run; other threads go on meanwhile."""
        ...


class LayerPace:
    """The pace of one thread. `record` makes an event behind what the thread has launched so far."""

    def __init__(self, record: Callable[[], Event], *, ahead: int = AHEAD) -> None:
        self._record = record
        self._ahead = ahead
        self._launched: deque[Event] = deque()  # oldest first

    def layer(self) -> None:
        """A layer has been launched. Returns when no more than `ahead` have not been run."""
        self._launched.append(self._record())
        while len(self._launched) > self._ahead:
            self._launched.popleft().synchronize()

    def finish(self) -> None:
        """Returns when everything has been run."""
        self._launched.clear()
        self._record().synchronize()
