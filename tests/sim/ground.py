"""What the parts of the small world share: time, chance, a log, the node's shared words and host memory."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable

from aegis.core.ids import BlockId
from aegis.core.model import KvShape
from aegis.core.request import EventHandle
from aegis.core.rng import Stream

Action = Callable[[], None]
Content = list[int | None]  # the tokens whose KV a block holds


class Ground:
    """Events of one time happen in the order they were scheduled in."""

    def __init__(self, seed: int) -> None:
        self.now_ns = 0
        self.draw = Stream(seed, "world")
        self.log: list[str] = []
        self.host: dict[tuple[KvShape, BlockId], Content] = {}
        self._words: defaultdict[int, int] = defaultdict(int)
        self._heap: list[tuple[int, int, Action]] = []
        self._sequence = 0

    def after(self, delay_ns: int, action: Action) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.now_ns + delay_ns, self._sequence, action))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._heap:
            self.now_ns, _, action = heapq.heappop(self._heap)
            action()

    def passed(self, event: EventHandle) -> bool:
        return self._words[event.word] >= event.value

    def signal(self, event: EventHandle) -> None:
        self._words[event.word] = event.value

    def poison(self, word: int) -> None:
        """Whoever waits for a word of a process that was lost goes on."""
        self._words[word] = (1 << 63) - 1
