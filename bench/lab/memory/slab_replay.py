"""KV slabs under a load, on the books alone: how much of them holds no block, and what fixed pools would leave empty.

Sequences are decoded one token a step, as many at a time as the load says; which model the next one is of follows a
popularity that wanders from model to model, so that what one shape gives up another one takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from msgspec import Struct

from aegis.core.block_runs import append_run, count_blocks, moved
from aegis.core.ids import BlockRun, SlabId
from aegis.core.model import KvLayer, KvShape
from memory.slab_pool import NoBlocks, SlabPool


class Load(Struct, frozen=True, kw_only=True):
    """`concurrent` sequences at any time. Every `shift_steps` the models' popularity, which falls off as 1/rank, moves
    on by one model. Lengths are drawn evenly, both ends included."""

    concurrent: int = 160
    steps: int = 3000
    shift_steps: int = 150
    prompt_tokens: tuple[int, int] = (1, 400)
    output_tokens: tuple[int, int] = (16, 200)
    seed: int = 0

    def draw_model(self, rng: Random, models: int, turn: int) -> int:
        (rank,) = rng.choices(range(models), [1 / (rank + 1) for rank in range(models)])
        return (turn + rank) % models

    def draw_lengths(self, rng: Random) -> tuple[int, int]:
        return rng.randint(*self.prompt_tokens), rng.randint(*self.output_tokens)


class Waste(Struct, frozen=True):
    """Shares of held bytes that hold no block, averaged over the run and weighted by bytes: of slabs that all shapes
    share, and of one fixed pool per shape that is as large as its own peak."""

    shared: float
    fixed: float
    held_bytes: int  # of slabs, on average
    held_max_bytes: int
    moved_bytes: int = 0  # by compaction


class WasteMeter:
    """Adds samples up: for each shape, whatever names it, bytes of its slabs and of its blocks in use."""

    def __init__(self) -> None:
        self._samples = self._held = self._held_max = self._taken = 0
        self._peaks: dict[object, int] = {}

    def add(self, shapes: Mapping[Any, tuple[int, int]]) -> None:
        held = sum(slabs for slabs, _ in shapes.values())
        self._samples += 1
        self._held += held
        self._held_max = max(self._held_max, held)
        for shape, (_, taken) in shapes.items():
            self._taken += taken
            self._peaks[shape] = max(self._peaks.get(shape, 0), taken)

    def result(self, moved_bytes: int = 0) -> Waste:
        return Waste(
            shared=1 - self._taken / self._held,
            fixed=1 - self._taken / (self._samples * sum(self._peaks.values())),
            held_bytes=self._held // self._samples,
            held_max_bytes=self._held_max,
            moved_bytes=moved_bytes,
        )


def llama_like(layers: int, kv_heads: int, head_dim: int) -> KvShape:
    """The KV shape of a model like Llama, in bfloat16."""
    return KvShape((KvLayer(kv_heads, head_dim, head_dim),) * layers, "bfloat16", 2)


MARKET_SLAB_BYTES = 16 << 20
MARKET_SHAPES = (
    llama_like(24, 2, 64),  # 0.5B
    llama_like(16, 8, 64),  # 1B
    llama_like(28, 2, 128),  # 1.5B
    llama_like(36, 2, 128),  # 3B
    llama_like(28, 8, 128),  # 3B
    llama_like(28, 4, 128),  # 7B
    llama_like(32, 8, 128),  # 8B
    llama_like(48, 8, 128),  # 14B
)
"""Of models as they are on offer, from 0.5B to 14B: blocks of 192 KiB to 3 MiB."""


@dataclass(slots=True, eq=False)
class _Sequence:
    shape: KvShape
    tokens: int
    end: int
    blocks: list[BlockRun] = field(default_factory=list)


class _Endless:
    """An endless source of slabs; the lowest free one comes first."""

    def __init__(self) -> None:
        self._back: list[SlabId] = []
        self._next = 0

    def available(self) -> int:
        return 1 << 30

    def take(self) -> SlabId:
        if self._back:
            return self._back.pop()
        self._next += 1
        return SlabId(self._next - 1)

    def give(self, slab: SlabId) -> None:
        self._back.append(slab)


class _Replay:
    def __init__(self, shapes: Sequence[KvShape], load: Load, slab_bytes: int) -> None:
        self.pool = SlabPool(slab_bytes, _Endless(), passed=lambda _: True)
        self.moved_bytes = 0
        self._shapes, self._load = shapes, load
        self._rng = Random(load.seed)
        self._sequences: list[_Sequence] = []

    def step(self, step: int) -> None:
        for sequence in self._sequences:
            sequence.tokens += 1
            self._grow(sequence)
        for sequence in [s for s in self._sequences if s.tokens >= s.end]:
            self.pool.free(sequence.shape, sequence.blocks)
            self._sequences.remove(sequence)
        while len(self._sequences) < self._load.concurrent:
            self._begin(step)

    def compact(self) -> None:
        """Compacts slabs as the decode core does between steps."""
        for shape, blocks in self.pool.sparse():
            copies = self.pool.compact(shape, blocks)
            self.moved_bytes += count_blocks(blocks) * shape.block_bytes
            for sequence in self._sequences:
                if sequence.shape == shape:
                    sequence.blocks = moved(sequence.blocks, copies)

    def _begin(self, step: int) -> None:
        model = self._load.draw_model(self._rng, len(self._shapes), step // self._load.shift_steps)
        prompt, output = self._load.draw_lengths(self._rng)
        started = self._rng.randrange(output) if step == 0 else 0  # not all of the first ones begin at once
        sequence = _Sequence(self._shapes[model], prompt + started, prompt + output)
        self._grow(sequence)
        self._sequences.append(sequence)

    def _grow(self, sequence: _Sequence) -> None:
        missing = sequence.shape.blocks_for(sequence.tokens) - count_blocks(sequence.blocks)
        if missing > 0:
            blocks = self.pool.alloc(sequence.shape, missing)
            assert not isinstance(blocks, NoBlocks)
            self.pool.commit(sequence.shape, blocks)
            for start, stop in blocks:
                append_run(sequence.blocks, start, stop)


def replay(
    shapes: Sequence[KvShape], load: Load, *, slab_bytes: int = MARKET_SLAB_BYTES, compacting: bool = True
) -> Waste:
    """The load on slabs of one size, the laws checked now and then."""
    world, meter = _Replay(shapes, load, slab_bytes), WasteMeter()
    for step in range(load.steps):
        world.step(step)
        if compacting:
            world.compact()
        if step % 10 == 0:
            meter.add({shape: _bytes(shape, world.pool) for shape in world.pool.use()})
        if step % 500 == 0:
            world.pool.check()
    return meter.result(world.moved_bytes)


def _bytes(shape: KvShape, pool: SlabPool) -> tuple[int, int]:
    use = pool.use()[shape]
    return use.slabs * use.slab_bytes, (use.reserved + use.used + use.moving) * use.block_bytes
