"""The three rules of Aegaeon §5.3 with real bytes: an instance's books, its mover and a device whose streams lag.

Every copy of every stream waits for a gate of its own, and the gates open in random order between the other things an
instance does: making KV, swapping it out and in, stepping on it, giving it up. Whatever the order, each step must find
the bytes of the step before. With any one of the rules broken, it does not.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from aegis.core.block_runs import Blocks, block_ids, count_blocks
from aegis.core.effects import CopyBlocks, Send, StreamName
from aegis.core.events import Progress
from aegis.core.ids import PageRun, SlabId
from aegis.core.messages import GrantPages
from aegis.core.model import KvLayer, KvShape
from aegis.core.request import EventHandle
from aegis.device.cached_images import CachedImages
from aegis.device.cpu.device import CpuDevice
from aegis.device.cpu.pool import PAGE_BYTES, CpuPool
from aegis.device.cpu.streams import CpuStream
from aegis.device.host_memory import SharedMemory
from aegis.device.memory_executor import MemoryExecutor
from aegis.device.shared_events import SharedWords
from aegis.device.stage_buffer import StageBuffer
from memory.budget import Budget
from memory.ledger import Ledger
from memory.slab_pool import NoBlocks

SHAPE = KvShape((KvLayer(heads=4, key_dim=64, value_dim=70),), "float32", 4)  # 34 304 bytes a block: slabs have tails
SLAB_PAGES = 2
SLAB_BYTES = SLAB_PAGES * PAGE_BYTES
STEPS = 120
SEEDS = range(12)
LONG_NS = 60_000_000_000


class LaggingStream(CpuStream):
    """Its copy n waits for the word `gate` to reach n."""

    gate: int
    held_back: int

    def copy(self, copies: Sequence[tuple[int, int, int]], *, urgency: int = 0) -> EventHandle:
        self.held_back += 1
        self.wait(EventHandle(self.gate, self.held_back))
        return super().copy(copies, urgency=urgency)


class LaggingDevice(CpuDevice):
    """Gates are words of the upper half."""

    def __init__(self, address: str, words: SharedWords, *, stream_words: Sequence[int]) -> None:
        super().__init__(address, words, stream_words=stream_words)
        self.lagging: list[LaggingStream] = []

    def stream(self, name: str, *, outwards: bool = False) -> LaggingStream:
        word = self._free_words.pop(0)
        stream = LaggingStream(name, word, self._words, self._pages, self._outwards if outwards else self._inwards)
        stream.gate, stream.held_back = self._words.count // 2 + word, 0
        self._streams.append(stream)
        self.lagging.append(stream)
        return stream

    def open_a_gate(self, rng: random.Random) -> bool:
        """Of any stream that is held back; false if none is."""
        closed = [stream for stream in self.lagging if self._words.load(stream.gate) < stream.held_back]
        if closed:
            gate = rng.choice(closed).gate
            self._words.store(gate, self._words.load(gate) + 1)
        return bool(closed)


@dataclass(slots=True, eq=False)
class Kv:
    """A sequence's. `blocks` are the device's or, swapped out, the host's; `value` is what each byte should be."""

    value: int
    blocks: Blocks
    swapped_out: EventHandle | None = None
    arrival: EventHandle | None = None


class Instance:
    """An instance's books and bytes without an engine. Methods named after a rule are what a test breaks."""

    def __init__(self, device: LaggingDevice, mover: MemoryExecutor) -> None:
        self.device, self.mover = device, mover
        budget = Budget(pages=SLAB_PAGES, page_bytes=PAGE_BYTES, slab_bytes=SLAB_BYTES, host_slabs=1, instances=1)
        self.ledger = Ledger(budget, mover.words, address_pages=1)
        self.ledger.balloon.granted(GrantPages((PageRun(0, SLAB_PAGES),)))
        self.ledger.grant([SlabId(0)])
        for region in (self.ledger.device, self.ledger.host):  # stays, so that the slabs do
            assert not isinstance(region.alloc(SHAPE, 1), NoBlocks)
        self.sequences: list[Kv] = []
        self.lost = False
        self._values = 0

    def act(self, rng: random.Random) -> None:
        action = rng.choice((self.make, self.swap_out, self.swap_in, self.step, self.step, self.give_up))
        action(rng)
        self.perform()
        if rng.random() < 0.4:
            self.device.open_a_gate(rng)
        self.book()
        self.ledger.check()

    def finish(self, rng: random.Random) -> None:
        """Lets everything arrive, and looks at what is on the device."""
        while self.device.open_a_gate(rng):
            pass
        for sequence in list(self.sequences):
            for event in (sequence.swapped_out, sequence.arrival):
                assert event is None or self.device.wait(event, timeout_ns=LONG_NS)
        self.book()
        for sequence in self.sequences:
            if sequence.swapped_out is None:
                self.look(sequence)

    def make(self, rng: random.Random) -> None:
        blocks = self.ledger.device.alloc(SHAPE, rng.randint(1, 30))
        if not isinstance(blocks, NoBlocks):
            self.perform()
            self.ledger.device.commit(SHAPE, blocks)
            self.sequences.append(Kv(0, blocks))
            self.write(self.sequences[-1])

    def swap_out(self, rng: random.Random) -> None:
        sequence = self.pick(rng, on_device=True)
        host = self.ledger.host.alloc(SHAPE, count_blocks(sequence.blocks)) if sequence else NoBlocks(0, 0)
        if sequence and not isinstance(host, NoBlocks):
            event = self.ledger.copy_out(SHAPE, sequence.blocks, host)
            self.ledger.host.commit(SHAPE, host)
            self.rule_3(self.ledger.device, sequence.blocks, event)
            sequence.blocks, sequence.swapped_out = host, event

    def swap_in(self, rng: random.Random) -> None:
        sequence = self.pick(rng, on_device=False)
        blocks = self.ledger.device.alloc(SHAPE, count_blocks(sequence.blocks)) if sequence else NoBlocks(0, 0)
        if sequence and sequence.swapped_out and not isinstance(blocks, NoBlocks):
            event = self.ledger.copy_in(SHAPE, sequence.blocks, blocks, sequence.swapped_out, ahead=rng.random() < 0.5)
            self.rule_2()
            self.rule_3(self.ledger.host, sequence.blocks, event)
            sequence.blocks, sequence.swapped_out, sequence.arrival = blocks, None, event

    def step(self, rng: random.Random) -> None:
        arrived = [s for s in self.sequences if s.swapped_out is None and (s.arrival is None or self.rule_1(s.arrival))]
        if arrived:
            sequence = rng.choice(arrived)
            if sequence.arrival is not None:
                self.ledger.device.commit(SHAPE, sequence.blocks)
                sequence.arrival = None
            self.look(sequence)
            self.write(sequence)

    def give_up(self, rng: random.Random) -> None:
        sequence = self.pick(rng, on_device=True)
        if sequence and len(self.sequences) > 3:
            self.sequences.remove(sequence)
            self.ledger.device.free(SHAPE, sequence.blocks)

    def rule_1(self, arrival: EventHandle) -> bool:
        """Compute waits for its own request's KV."""
        return self.ledger.transfers.passed(arrival)

    def rule_2(self) -> None:
        """A transfer waits for the last one of its source: the books say so in `after`."""

    def rule_3(self, region: object, blocks: Blocks, event: EventHandle) -> None:
        """What a transfer still touches is on the move list."""
        region.free_after(SHAPE, blocks, event)

    def pick(self, rng: random.Random, *, on_device: bool) -> Kv | None:
        there = [s for s in self.sequences if (s.swapped_out is None and s.arrival is None) == on_device]
        there = [s for s in there if on_device or s.swapped_out is not None]
        return rng.choice(there) if there else None

    def write(self, sequence: Kv) -> None:
        """What a step does: new contents."""
        self._values += 1
        sequence.value = self._values % 255 + 1
        for address in self.addresses(sequence):
            ctypes.memset(address, sequence.value, SHAPE.block_bytes)

    def look(self, sequence: Kv) -> None:
        whole = bytes([sequence.value]) * SHAPE.block_bytes
        self.lost |= any(ctypes.string_at(at, SHAPE.block_bytes) != whole for at in self.addresses(sequence))

    def addresses(self, sequence: Kv) -> Iterator[int]:
        per_slab = SLAB_BYTES // SHAPE.block_bytes
        for block in block_ids(sequence.blocks):
            yield self.mover.kv.base + block // per_slab * SLAB_BYTES + block % per_slab * SHAPE.block_bytes

    def book(self) -> None:
        for progress in self.mover.progress():
            assert isinstance(progress, Progress)
            self.ledger.progress(progress.stream, progress.value)

    def perform(self) -> None:
        for effect in self.ledger.drain():
            assert not isinstance(effect, Send)
            self.mover.perform(effect)


class StepsBeforeArrival(Instance):
    def rule_1(self, arrival: EventHandle) -> bool:
        return True


class CopiesBeforeItsSourceIsThere(Instance):
    def rule_2(self) -> None:
        copies = self.ledger.effects[-1]
        assert isinstance(copies, CopyBlocks) and copies.stream is StreamName.SWAP_IN
        self.ledger.effects[-1] = CopyBlocks(copies.stream, copies.shape, copies.copies, None, copies.event)


class FreesWhatIsStillCopied(Instance):
    def rule_3(self, region: object, blocks: Blocks, event: EventHandle) -> None:
        region.free(SHAPE, blocks)


@contextmanager
def running(kind: type[Instance]) -> Iterator[Instance]:
    words, pool = SharedWords.create(16), CpuPool(SLAB_BYTES, ahead_pages=0)
    host, cache = SharedMemory.create(SLAB_BYTES, "host"), SharedMemory.create(PAGE_BYTES, "cache")
    device = LaggingDevice(pool.address, words, stream_words=range(7))
    images, stage = CachedImages(device, cache.path), StageBuffer(device, words, 7)
    region = device.open_host(host.path, writable=True)
    yield kind(device, MemoryExecutor(device, region, images, stage, slab_bytes=SLAB_BYTES, address_pages=1))
    stage.close()
    images.close()
    device.close()
    for memory in (host, cache, pool, words):
        memory.close()


def bytes_are_lost(kind: type[Instance], seed: int) -> bool:
    rng = random.Random(seed)
    with running(kind) as instance:
        for _ in range(STEPS):
            instance.act(rng)
            if instance.lost:
                break
        else:
            instance.finish(rng)
        return instance.lost


@pytest.mark.parametrize("seed", SEEDS)
def test_no_byte_is_lost_however_late_the_streams_are(seed: int) -> None:
    assert not bytes_are_lost(Instance, seed)


@pytest.mark.parametrize("kind", [StepsBeforeArrival, CopiesBeforeItsSourceIsThere, FreesWhatIsStillCopied])
def test_each_rule_is_needed(kind: type[Instance]) -> None:
    assert any(bytes_are_lost(kind, seed) for seed in SEEDS)
