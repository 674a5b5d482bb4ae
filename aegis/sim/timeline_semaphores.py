"""The timeline semaphores of a simulated node: what its copies signal and wait for, as `aegis.device.shared_events`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from aegis.core.request import EventHandle


class TimelineSemaphores:
    """An event has passed once its word has reached its value. A word only grows."""

    __slots__ = ("_values", "_waiting")

    def __init__(self) -> None:
        self._values: defaultdict[int, int] = defaultdict(int)
        self._waiting: defaultdict[int, list[tuple[int, Callable[[], None]]]] = defaultdict(list)

    def passed(self, event: EventHandle) -> bool:
        return self._values[event.word] >= event.value

    def when(self, event: EventHandle, action: Callable[[], None]) -> None:
        """Does the action once the event has passed, which it has not yet."""
        self._waiting[event.word].append((event.value, action))

    def signal(self, event: EventHandle) -> None:
        self._values[event.word] = event.value
        if event.word not in self._waiting:
            return
        for value, action in self._waiting.pop(event.word):
            if value <= event.value:
                action()
            else:
                self._waiting[event.word].append((value, action))
