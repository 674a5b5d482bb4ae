"""A swap-in of many requests' KV at once, with the time of each arrival and of the first decode step.

The decode core, the books, the mover and the CPU device are an instance's own; the KV lies in host slabs, as a prefill
instance left it. A step reads each row's KV and finds the mark of its request there, so what runs has arrived.
"""

from __future__ import annotations

import ctypes
import time
from threading import Thread

from msgspec import Struct

from aegis.core.block_runs import block_ids, first_blocks
from aegis.core.effects import Effect, Run, Send, StreamName
from aegis.core.estimators import Hardware
from aegis.core.events import InstanceEvent, Stepped
from aegis.core.ids import InstanceId, ModelId, PageRun, RequestId
from aegis.core.messages import AddModel, Adopt, GrantPages, ImageCached, NeedPages
from aegis.core.model import IMAGE_EXTENT_BYTES, KvLayer, KvShape
from aegis.core.request import EventHandle, Job, KvHandle, Sampling, Token
from aegis.device.cached_images import CachedImages
from aegis.device.cpu.device import CpuDevice
from aegis.device.cpu.pool import PAGE_BYTES, CpuPool
from aegis.device.host_memory import SharedMemory
from aegis.device.memory_executor import MemoryEffect, MemoryExecutor
from aegis.device.shared_events import SharedWords
from aegis.device.stage_buffer import STAGE_WORDS, StageBuffer
from bench.lab.sized_models import spec_of
from decode.core import DecodeCore
from decode.policies.weighted_round_robin import WeightedRoundRobin
from memory.budget import Budget
from memory.ledger import Ledger

_SHAPE = KvShape((KvLayer(heads=8, key_dim=64, value_dim=64),) * 4, "float32", 4)  # 16 KiB a token
_PEER = InstanceId("prefill-0")
_TIMEOUT_NS = 60_000_000_000


class Arrivals(Struct, frozen=True):
    """Times after the command: the first and the last request's KV were seen to be there, the first step began, when as
    many as `arrived_at_first_step` had passed."""

    requests: int
    nbytes: int  # of KV, all requests together
    first_arrival_ns: int
    first_step_ns: int
    last_arrival_ns: int
    arrived_at_first_step: int


class Instance:
    """A decode instance whose engine only looks for each request's mark in its KV, and finds it."""

    def __init__(self, requests: int, blocks: int) -> None:
        self._requests, self._blocks = requests, blocks
        slabs = requests * (-(-(blocks + 1) * _SHAPE.block_bytes // PAGE_BYTES) + 1)
        pages = slabs + 1
        self._words = SharedWords.create(len(StreamName) + STAGE_WORDS + 1)
        self._pool = CpuPool(pages * PAGE_BYTES, ahead_pages=0)
        self._memory = [SharedMemory.create(nbytes, "bench") for nbytes in (slabs * PAGE_BYTES, IMAGE_EXTENT_BYTES)]
        words = range(self._words.count - 1)
        self._device = CpuDevice(self._pool.address, self._words, stream_words=words[:-1])
        self._host = self._device.open_host(self._memory[0].path, writable=True)
        self._images = CachedImages(self._device, self._memory[1].path)
        self._stage = StageBuffer(self._device, self._words, words[-1])
        self._mover = MemoryExecutor(
            self._device, self._host, self._images, self._stage, slab_bytes=PAGE_BYTES, address_pages=pages
        )
        budget = Budget(pages=pages, page_bytes=PAGE_BYTES, slab_bytes=PAGE_BYTES, host_slabs=slabs, instances=1)
        ledger = Ledger(budget, self._mover.words, address_pages=pages)
        self._core = DecodeCore(InstanceId("decode-0"), ledger, WeightedRoundRobin(), Hardware())
        self._spec = spec_of(ModelId("bench"), _SHAPE, image_bytes=PAGE_BYTES)
        self._arrived_ns: list[int] = []
        self._steps_ns: list[int] = []
        self._arrived_at_steps: list[int] = []
        self._before = 0  # transfers of earlier swap-ins
        self._events: list[InstanceEvent] = [
            AddModel(self._spec),
            ImageCached(self._spec.model, (PageRun(0, 1),)),
            GrantPages((PageRun(0, pages),)),
        ]
        while self._events:
            self._play()

    def swap_in(self) -> Arrivals:
        """Until every request has made its last token."""
        adoptions = [self._adoption(request) for request in range(self._requests)]
        self._before = self._words.load(self._mover.words[StreamName.SWAP_IN])
        watch = Thread(target=self._watch)
        watch.start()
        self._steps_ns.clear()
        self._arrived_at_steps.clear()
        start_ns = time.monotonic_ns()
        self._events += adoptions
        while self._core.queued + self._core.running or self._events:
            self._play()
        watch.join()
        first_ns, last_ns = self._arrived_ns[0], self._arrived_ns[-1]
        return Arrivals(
            requests=self._requests,
            nbytes=self._requests * self._blocks * _SHAPE.block_bytes,
            first_arrival_ns=first_ns - start_ns,
            first_step_ns=self._steps_ns[0] - start_ns,
            last_arrival_ns=last_ns - start_ns,
            arrived_at_first_step=self._arrived_at_steps[0],
        )

    def _watch(self) -> None:
        """Notes when each transfer has passed, on a thread of its own."""
        self._arrived_ns.clear()
        for value in range(self._before + 1, self._before + self._requests + 1):
            assert self._words.wait(self._mover.words[StreamName.SWAP_IN], value, timeout_ns=_TIMEOUT_NS)
            self._arrived_ns.append(time.monotonic_ns())

    def close(self) -> None:
        self._stage.close()
        self._images.close()
        self._device.close()
        self._pool.close()
        for memory in self._memory:
            memory.close()
        self._words.close()

    def _adoption(self, request: int) -> Adopt:
        """One token is to be made by each; its KV bears the number of the request."""
        per_slab = PAGE_BYTES // _SHAPE.block_bytes
        run = (request * self._blocks, (request + 1) * self._blocks)
        for block in block_ids([run]):
            slab, index = divmod(block, per_slab)
            ctypes.memset(
                self._host.base + slab * PAGE_BYTES + index * _SHAPE.block_bytes, request + 1, _SHAPE.block_bytes
            )
        tokens = self._blocks * _SHAPE.block_tokens
        job = Job(RequestId(request), 1, self._spec.model, (1,) * tokens, Sampling(max_tokens=2), 0)
        written = EventHandle(self._words.count - 1, 0)
        return Adopt(job, (1,), KvHandle(_PEER, (run,), tokens, written))

    def _play(self) -> None:
        """One event, as if the requests came one by one, then what the streams have completed."""
        events, self._events = [*self._events[:1], *self._mover.progress()], self._events[1:]
        for event in events:
            for effect in self._core.on(event, time.monotonic_ns()):
                self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Run():
                self._steps_ns.append(time.monotonic_ns())
                passed = self._words.load(self._mover.words[StreamName.SWAP_IN])
                self._arrived_at_steps.append(passed - self._before)
                self._events.append(self._step(effect))
            case Send(NeedPages()):
                self._events.append(GrantPages((), refused=True))
            case _ if isinstance(effect, MemoryEffect):
                self._mover.perform(effect)

    def _step(self, effect: Run) -> Stepped:
        start_ns = time.monotonic_ns()
        for row in effect.rows:
            for block in block_ids(first_blocks(row.blocks, self._blocks)):
                slab, index = divmod(block, PAGE_BYTES // _SHAPE.block_bytes)
                at = self._mover.kv.base + slab * PAGE_BYTES + index * _SHAPE.block_bytes
                for end in (at, at + _SHAPE.block_bytes - 1):
                    mark = ctypes.c_ubyte.from_address(end).value
                    assert mark == row.job.request + 1, "a step ran before its KV came"
        return Stepped(((Token(1),) * len(effect.rows),), time.monotonic_ns() - start_ns)


def arrivals(requests: int = 32, blocks: int = 16) -> Arrivals:
    """`blocks` of 256 KiB each, one transfer per request."""
    instance = Instance(requests, blocks)
    instance.swap_in()  # takes the memory from the system
    measured = instance.swap_in()
    instance.close()
    return measured
