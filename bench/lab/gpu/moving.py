"""GPU memory on the move: mapping, weight copies, prefetched activations. Not run on a GPU yet."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from aegis.core.ids import PageRun
from aegis.device.cuda.driver import Driver
from aegis.engine.tensor_views import tensor_at
from bench.common.figures import Figure, at_least, at_most
from bench.lab.gpu.gpu_instance import GpuInstance, Resident
from bench.lab.gpu.random_models import LLAMA_8B, make, small

_BATCH = 64
_REPETITIONS = 20


def figures(directory: Path, *, tiny: bool) -> Iterator[Figure]:
    config = small(4) if tiny else LLAMA_8B
    model = make("moving", config, directory)
    gpu = GpuInstance(weight_bytes=model.spec.manifest.image_bytes + (64 << 20), kv_bytes=256 << 20)
    resident = gpu.add(model, seed=1)
    yield from _mapping(gpu)
    yield from _copies(gpu, resident)
    yield from _activation(gpu, resident)
    yield at_most("driver calls that stop the device", gpu.device.device_wide, "calls", 0)
    gpu.close()


def _mapping(gpu: GpuInstance) -> Iterator[Figure]:
    """Per page of 2 MiB, in batches of 64. Nothing else is mapped there."""
    start_ns = time.perf_counter_ns()
    space = gpu.device.reserve(1 << 40)
    yield at_most("reserve 1 TiB", (time.perf_counter_ns() - start_ns) / 1e6, "ms", 1)
    first = gpu.device.page_count - _BATCH
    maps, unmaps = [], []
    for _ in range(_REPETITIONS):
        maps.append(_timed(lambda: space.map(0, [PageRun(first, first + _BATCH)])))
        unmaps.append(_timed(lambda: space.unmap(0, _BATCH)))
    per_page = 1e3 * _BATCH * gpu.page_bytes / (2 << 20)
    yield at_most("map 2 MiB, 64 at a time", statistics.median(maps) / per_page, "µs", 40)
    yield at_most("unmap 2 MiB, 64 at a time", statistics.median(unmaps) / per_page, "µs", 20)


def _copies(gpu: GpuInstance, resident: Resident) -> Iterator[Figure]:
    """The image through the weights stream, beside one bare copy of as many page-locked bytes by the driver."""
    gpu.place(resident)
    ours, bare = [], []
    for attempt in range(4):
        start_ns = time.perf_counter_ns()
        gpu.finish(gpu.load(resident))
        passed_ns = time.perf_counter_ns() - start_ns
        bare_ns = _bare_copy(resident)
        if attempt:  # the first warms up
            ours.append(passed_ns)
            bare.append(bare_ns)
    ratio = statistics.median(theirs / mine for theirs, mine in zip(bare, ours, strict=True))
    yield Figure("image", resident.nbytes / (1 << 30), "GiB")
    yield Figure("page-locked copy", resident.nbytes / statistics.median(bare), "GB/s")
    yield Figure("weight copy", resident.nbytes / statistics.median(ours), "GB/s")
    yield at_least("weight copy ÷ page-locked copy", ratio, "", 0.95)
    gpu.evict(resident)


def _bare_copy(resident: Resident) -> int:
    driver = Driver()
    stream = driver("cuStreamCreate", driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
    start_ns = time.perf_counter_ns()
    driver("cuMemcpyAsync", resident.range.base, resident.image.base, resident.nbytes, stream)
    driver("cuStreamSynchronize", stream)
    passed_ns = time.perf_counter_ns() - start_ns
    driver("cuStreamDestroy", stream)
    return passed_ns


def _activation(gpu: GpuInstance, resident: Resident) -> Iterator[Figure]:
    """Of a model that was loaded before: it is found to be there, and its first and last bytes are read."""
    gpu.place(resident)
    gpu.finish(gpu.load(resident))
    ends = [resident.range.base, resident.range.base + resident.nbytes - 16]
    views = [tensor_at(at, (16,), torch.uint8, torch.device("cuda")) for at in ends]
    torch.cat(views).tolist()  # warms up

    def activate() -> None:
        assert resident.loaded is not None and gpu.device.passed(resident.loaded)
        torch.cat(views).tolist()

    durations_ns = [_timed(activate) for _ in range(_REPETITIONS)]
    yield at_most("activate a prefetched model", statistics.median(durations_ns) / 1e6, "ms", 2)
    gpu.evict(resident)


def _timed(work: Callable[[], object]) -> int:
    start_ns = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - start_ns
