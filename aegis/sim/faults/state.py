"""The state that the parts of this world share: time, chance, a log, the node's semaphores and host memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection

from aegis.core.ids import BlockId, InstanceId, ModelId, SlabId
from aegis.core.model import KvShape
from aegis.core.request import EventHandle
from aegis.core.rng import Stream
from aegis.sim.event_queue import EventQueue
from aegis.sim.faults.fake_models import PAGE
from aegis.sim.timeline_semaphores import TimelineSemaphores

MESSAGE_NS = 50_000
_FOR_EVER_NS = 100_000_000_000
_POISON = (1 << 63) - 1

Action = Callable[[], None]
Made = int | tuple[int, ModelId]
"""The KV of a token, as the model made it or as an adapter did."""

Content = list[Made | None]  # the tokens whose KV a block holds


class FaultWorldState:
    """Events of one time happen in the order they were scheduled in. `unreadable_share` is of loads from disk."""

    def __init__(self, seed: int, *, jitter_ns: int, failing_share: float, unreadable_share: float = 0.0) -> None:
        self.failing_share = failing_share
        self.unreadable_share = unreadable_share
        self.draw = Stream(seed, "world")
        self.log: list[str] = []
        self.host: dict[tuple[KvShape, BlockId], Content] = {}
        self.leased: defaultdict[SlabId, int] = defaultdict(int)  # the number of leases of each host slab
        self.images: dict[int, ModelId] = {}  # whose image is in an extent of the node's model cache
        self.pages: dict[int, InstanceId] = {}  # of the shared device, with the instance that each was granted to
        self.dirty: set[int] = set()  # pages that were mapped and not wiped since
        self._agenda = EventQueue()
        self.semaphores = TimelineSemaphores()
        self._jitter_ns = jitter_ns
        self._arrives_ns: defaultdict[str, int] = defaultdict(int)  # the last message of a link
        self._late: dict[str, tuple[int, int]] = {}  # until when messages of a link take how much longer

    @property
    def now_ns(self) -> int:
        return self._agenda.now_ns

    def note(self, what: str) -> None:
        self.log.append(f"{self.now_ns} {what}")

    def after(self, delay_ns: int, action: Action) -> None:
        self._agenda.at(self.now_ns + delay_ns, action)

    def send(self, link: str, action: Action) -> None:
        """A message takes its time, and none overtakes another on the same link."""
        until_ns, late_ns = self._late.get(link, (0, 0))
        at_ns = self.now_ns + MESSAGE_NS + self.draw.below(self._jitter_ns + 1)
        at_ns += late_ns if self.now_ns < until_ns else 0
        at_ns = self._arrives_ns[link] = max(at_ns, self._arrives_ns[link])
        self.after(at_ns - self.now_ns, action)

    def delay(self, link: str, for_ns: int, late_ns: int) -> None:
        """Messages that are sent in this time come so much later."""
        self._late[link] = (self.now_ns + for_ns, late_ns)

    def links(self) -> list[str]:
        """The links that a message was sent on."""
        return sorted(self._arrives_ns)

    def run(self) -> None:
        """Runs until nothing is left to happen."""
        self._agenda.run(_FOR_EVER_NS)
        assert not self._agenda, "something goes on for ever"

    def lease(self, slabs: Collection[SlabId]) -> None:
        """The slabs have a new owner, which finds nothing in them."""
        for slab in slabs:
            self.leased[slab] += 1
        gone = set(slabs)
        for key in [key for key in self.host if slab_of(*key) in gone]:
            del self.host[key]

    def poison(self, word: int) -> None:
        """Parts that wait for a word of a lost process go on."""
        self.semaphores.signal(EventHandle(word, _POISON))


def slab_of(shape: KvShape, block: BlockId) -> SlabId:
    return SlabId(block // (PAGE // shape.block_bytes))
