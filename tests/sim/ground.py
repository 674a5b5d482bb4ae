"""What the parts of the small world share: time, chance, a log, the node's shared words and host memory."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable

from aegis.core.ids import BlockId, InstanceId
from aegis.core.model import KvShape
from aegis.core.request import EventHandle
from aegis.core.rng import Stream

MESSAGE_NS = 50_000
_FOR_EVER_NS = 100_000_000_000

Action = Callable[[], None]
Content = list[int | None]  # the tokens whose KV a block holds


class Ground:
    """Events of one time happen in the order they were scheduled in."""

    def __init__(self, seed: int, *, jitter_ns: int, failing_share: float) -> None:
        self.now_ns = 0
        self.failing_share = failing_share
        self._jitter_ns = jitter_ns
        self._arrives_ns: defaultdict[str, int] = defaultdict(int)  # the last message of a link
        self.draw = Stream(seed, "world")
        self.log: list[str] = []
        self.host: dict[tuple[KvShape, BlockId], Content] = {}
        self.pages: dict[int, InstanceId] = {}  # of the device they all share, by whom they were granted to
        self.dirty: set[int] = set()  # pages that were mapped and not wiped since
        self._words: defaultdict[int, int] = defaultdict(int)
        self._heap: list[tuple[int, int, Action]] = []
        self._sequence = 0

    def after(self, delay_ns: int, action: Action) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (self.now_ns + delay_ns, self._sequence, action))

    def send(self, link: str, action: Action) -> None:
        """A message takes its time, and none overtakes another on the same link."""
        at_ns = self.now_ns + MESSAGE_NS + self.draw.below(self._jitter_ns + 1)
        at_ns = self._arrives_ns[link] = max(at_ns, self._arrives_ns[link])
        self.after(at_ns - self.now_ns, action)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._heap:
            self.now_ns, _, action = heapq.heappop(self._heap)
            assert self.now_ns < _FOR_EVER_NS, "something goes on for ever"
            action()

    def passed(self, event: EventHandle) -> bool:
        return self._words[event.word] >= event.value

    def signal(self, event: EventHandle) -> None:
        self._words[event.word] = event.value

    def poison(self, word: int) -> None:
        """Whoever waits for a word of a process that was lost goes on."""
        self._words[word] = (1 << 63) - 1
