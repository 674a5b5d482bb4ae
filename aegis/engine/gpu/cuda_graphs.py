"""Decode steps recorded once and replayed: a graph for each model and bucket.

A step launches some ten kernels per layer, which takes the host longer than a small batch takes the GPU. A graph is one
launch. It stays valid while its model is evicted and comes back, since weights and KV are always at the same addresses.

A step is recorded when its bucket is seen for the second time: the first run is what compiles kernels. What cannot be
recorded, such as experts chosen by the host, is run as it is for good.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Protocol

import torch

from aegis.core.ids import ModelId
from aegis.engine.tensor_views import tensor_at

GRAPHS = 512
GRAPH_BYTES = 2 << 30

DRIVER_BYTES = 32 << 20
"""Of a graph, at most, beside what torch takes for it. What else is missing after a recording, others took."""

Forward = Callable[[], torch.Tensor]


class Recording(Protocol):
    """A recorded step. `output` is what `replay` writes; the next replay of any graph may overwrite it."""

    @property
    def output(self) -> torch.Tensor: ...

    @property
    def nbytes(self) -> int: ...

    def replay(self) -> None: ...


class DecodeGraphs:
    """At most `graphs` recordings, the least recently used goes first, and none any more beyond `nbytes` of memory."""

    def __init__(
        self, record: Callable[[Forward], Recording], *, graphs: int = GRAPHS, nbytes: int = GRAPH_BYTES
    ) -> None:
        self._record = record
        self._graphs_most = graphs
        self._nbytes_most = nbytes
        self._recordings: dict[tuple[ModelId, int], Recording] = {}  # least recently used first
        self._seen: set[tuple[ModelId, int]] = set()
        self._refused: set[ModelId] = set()
        self._lock = Lock()  # models are dropped by another thread than a lane's

    @property
    def nbytes(self) -> int:
        """Memory that the recordings took when they were made. They share what they compute in."""
        return sum(recording.nbytes for recording in self._recordings.values())

    @property
    def count(self) -> int:
        return len(self._recordings)

    def run(self, model: ModelId, bucket: int, forward: Forward) -> torch.Tensor:
        """The result of `forward`, which must depend on nothing but the model, the bucket and memory at fixed
        addresses."""
        with self._lock:
            return self._run(model, bucket, forward)

    def drop(self, model: ModelId) -> None:
        """Forgets everything about it."""
        with self._lock:
            for key in [key for key in self._seen if key[0] == model]:
                self._seen.remove(key)
                self._recordings.pop(key, None)
            self._refused.discard(model)

    def _run(self, model: ModelId, bucket: int, forward: Forward) -> torch.Tensor:
        key = (model, bucket)
        recording = self._recordings.pop(key, None)
        if recording is None and key in self._seen and model not in self._refused and self.nbytes < self._nbytes_most:
            recording = self._try(model, forward)
        self._seen.add(key)
        if recording is None:
            return forward()
        self._recordings[key] = recording
        if len(self._recordings) > self._graphs_most:
            del self._recordings[next(iter(self._recordings))]
        recording.replay()
        return recording.output

    def _try(self, model: ModelId, forward: Forward) -> Recording | None:
        try:
            return self._record(forward)
        except RuntimeError:  # torch raises it if something cannot be recorded
            self._refused.add(model)
            return None


class CudaRecorder:
    """Makes recordings as CUDA graphs, all in one memory pool: no two of them run at once, and an output is read before
    the next one runs. Not run on a GPU.

    `torch.cuda.graph` would do, but waits for the whole device. Only the recording thread is forbidden what a recording
    cannot hold: the streams' threads go on meanwhile.

    torch takes no recording into a pool whose graphs are all gone, so the last one is kept, whatever becomes of its
    model. Nor does it into a pool in which a recording broke: the next ones go to another.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._last: torch.cuda.CUDAGraph | None = None
        self._broken: list[torch.cuda.CUDAGraph] = []  # torch may still ask them whether memory is for them

    def __call__(self, forward: Forward) -> Recording:
        """Raises RuntimeError if `forward` does what a graph cannot hold. The current stream must be none that
        others wait for implicitly."""
        free_before, reserved_before = self._memory()
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = forward()
            finally:
                graph.capture_end()
        except BaseException:
            self._leave_pool(graph)
            raise
        self._last = graph
        free_after, reserved_after = self._memory()
        nbytes = min(free_before - free_after, reserved_after - reserved_before + DRIVER_BYTES)
        return _CudaGraph(graph, output, max(nbytes, 0))

    def _memory(self) -> tuple[int, int]:
        """What is free of the GPU's, and what torch has in this process."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free, torch.cuda.memory_reserved(self._device)

    def _leave_pool(self, graph: torch.cuda.CUDAGraph) -> None:
        """The graph is broken. Some releases of torch believe for good that it is being recorded then, and free no
        memory that two streams have used."""
        with suppress(RuntimeError):  # it does not believe so
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        self._broken.append(graph)
        self._pool = torch.cuda.graph_pool_handle()


class _CudaGraph:
    """Holds no reference to its output, so that the next recording may use the memory."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: torch.Tensor, nbytes: int) -> None:
        assert output.is_contiguous()
        self._graph = graph
        self.output = tensor_at(output.data_ptr(), output.shape, output.dtype, output.device)
        self.nbytes = nbytes

    def replay(self) -> None:
        self._graph.replay()
