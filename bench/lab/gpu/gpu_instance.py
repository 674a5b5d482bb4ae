"""A GPU with an engine on it and models that take turns in its memory, as one instance has it, without the scheduling.

Not run on a GPU yet.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aegis.core.ids import ModelId, PageRun, RequestId
from aegis.core.request import EventHandle, Sampling
from aegis.device.cuda.device import CudaDevice
from aegis.device.cuda.memory_mapping import CudaRange
from aegis.device.cuda.pinned_memory import PinnedFile
from aegis.device.cuda.pool import CudaPool
from aegis.device.host_memory import SharedMemory
from aegis.device.shared_events import SharedWords
from aegis.engine.block_table import block_table
from aegis.engine.protocol import KvRegion, StepRow
from aegis.engine.transformers_engine import TransformersEngine
from bench.lab.gpu.random_models import RandomModel

_TIMEOUT_NS = 120_000_000_000
_SLAB_BYTES = 32 << 20


@dataclass
class Resident:
    """A model, its addresses and its image in page-locked memory. `pages` is where it is mapped now, if it is."""

    model: RandomModel
    range: CudaRange
    memory: SharedMemory
    image: PinnedFile
    pages: PageRun | None = None
    loaded: EventHandle | None = None

    @property
    def nbytes(self) -> int:
        return self.model.spec.manifest.image_bytes


class GpuInstance:
    """`weight_bytes` of memory for models, `kv_bytes` for KV."""

    def __init__(self, *, weight_bytes: int, kv_bytes: int = 1 << 30) -> None:
        self.words = SharedWords.create(16)
        self.pool = CudaPool(weight_bytes + kv_bytes)
        self.device = CudaDevice(self.pool.address, self.words)
        self.page_bytes = self.device.page_bytes
        self._kv_pages = kv_bytes // self.page_bytes
        self.device.grant([PageRun(0, self.device.page_count)])
        self._kv = self.device.reserve(kv_bytes)
        self._kv.map(0, [PageRun(0, self._kv_pages)])
        region = KvRegion(self._kv.base, self._kv_pages * self.page_bytes, _SLAB_BYTES)
        self.engine = TransformersEngine(region, device="cuda")
        self.stream = self.device.stream("weights")
        self.models: dict[ModelId, Resident] = {}

    def add(self, model: RandomModel, seed: int) -> Resident:
        """Makes its weights and its image, and leaves it evicted."""
        nbytes = model.spec.manifest.image_bytes
        memory = SharedMemory.create(nbytes, "image")
        image = self.device.open_host(memory.path, writable=True)
        resident = Resident(model, self.device.reserve(nbytes), memory, image)
        self.models[model.spec.model] = resident
        self.engine.attach(model.spec, resident.range.base)
        self.place(resident)
        model.fill(resident.range.base, seed)
        torch.cuda.current_stream().synchronize()
        self.finish(self.stream.copy([(image.base, resident.range.base, nbytes)]))
        self.evict(resident)
        return resident

    def place(self, resident: Resident, first: int = 0) -> None:
        """Maps it to pages from `first` on among those for weights."""
        count = -(-resident.nbytes // self.page_bytes)
        resident.pages = PageRun(self._kv_pages + first, self._kv_pages + first + count)
        resident.range.map(0, [resident.pages])

    def load(self, resident: Resident) -> EventHandle:
        resident.loaded = self.stream.copy([(resident.range.base, resident.image.base, resident.nbytes)])
        return resident.loaded

    def evict(self, resident: Resident) -> None:
        assert resident.pages is not None
        resident.range.unmap(0, resident.pages.stop - resident.pages.start)
        resident.pages = None

    def finish(self, event: EventHandle) -> None:
        assert self.device.wait(event, timeout_ns=_TIMEOUT_NS)

    def generate(self, resident: Resident, prompts: Sequence[Sequence[int]], steps: int) -> Generated:
        """Greedy tokens of all prompts decoded together, and how long each step took."""
        spec = resident.model.spec
        count = max(spec.manifest.kv.blocks_for(len(prompt) + steps + 1) for prompt in prompts)
        sampling = Sampling(max_tokens=steps + 1, temperature=0.0)
        tokens, blocks = [], []
        for number, prompt in enumerate(prompts):
            blocks.append(block_table([(number * count, (number + 1) * count)]))
            self.engine.start(spec.model, RequestId(number), prompt, (), sampling)
            (first,) = self.engine.step(spec.model, [StepRow(RequestId(number), prompt, 0, blocks[-1])])
            assert first
            tokens.append([first.token.id])
        durations_ns = []
        for step in range(steps):
            rows = [
                StepRow(RequestId(number), own[-1:], len(prompts[number]) + step, blocks[number])
                for number, own in enumerate(tokens)
            ]
            start_ns = time.perf_counter_ns()
            for own, sampled in zip(tokens, self.engine.step(spec.model, rows), strict=True):
                assert sampled
                own.append(sampled.token.id)
            durations_ns.append(time.perf_counter_ns() - start_ns)
        for number in range(len(prompts)):
            self.engine.stop(RequestId(number))
        return Generated(tokens, durations_ns)

    def close(self) -> None:
        for resident in self.models.values():
            self.engine.detach(resident.model.spec.model)
            resident.memory.close()
        self.device.close()
        self.pool.close()
        self.words.close()


@dataclass(frozen=True)
class Generated:
    tokens: list[list[int]]
    durations_ns: list[int]
