from __future__ import annotations

from itertools import count

import pytest
import torch

from aegis.core.ids import ModelId
from aegis.engine.gpu.cuda_graphs import DRIVER_BYTES, CudaRecorder, DecodeGraphs, Forward

A, B = ModelId("a"), ModelId("b")


class Replayed:
    """What a CUDA graph does, without one: the same work again, to the same place."""

    made = 0

    def __init__(self, forward: Forward) -> None:
        type(self).made += 1
        self._forward = forward
        self.output = torch.zeros_like(forward())
        self.nbytes = 100

    def replay(self) -> None:
        self.output.copy_(self._forward())


def unrecordable(forward: Forward) -> Replayed:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.fixture(autouse=True)
def count_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replayed, "made", 0)


def test_a_step_is_recorded_when_its_bucket_comes_again_and_sees_new_inputs() -> None:
    graphs, inputs, runs = DecodeGraphs(Replayed), torch.zeros(2), []

    def forward() -> torch.Tensor:
        runs.append(1)
        return inputs * 2

    assert graphs.run(A, 2, forward).tolist() == [0, 0]
    assert (Replayed.made, len(runs)) == (0, 1)
    for value in (1.0, 2.0, 3.0):
        inputs.fill_(value)
        assert graphs.run(A, 2, forward).tolist() == [2 * value] * 2
    assert (Replayed.made, graphs.count, graphs.nbytes) == (1, 1, 100)


def test_models_and_buckets_have_graphs_of_their_own() -> None:
    graphs = DecodeGraphs(Replayed)
    for _ in range(3):
        for model, bucket, value in ((A, 1, 1.0), (A, 2, 2.0), (B, 1, 3.0)):
            assert graphs.run(model, bucket, lambda value=value: torch.tensor([value])).tolist() == [value]
    assert graphs.count == 3
    graphs.drop(A)
    assert graphs.count == 1
    graphs.run(A, 1, lambda: torch.zeros(1))
    assert Replayed.made == 3, "a dropped model starts anew"


def test_the_least_recently_used_goes_first() -> None:
    graphs = DecodeGraphs(Replayed, graphs=2)
    for bucket in (1, 1, 2, 2, 1, 4, 4):
        graphs.run(A, bucket, lambda: torch.zeros(1))
    assert (graphs.count, Replayed.made) == (2, 3)
    graphs.run(A, 1, lambda: torch.zeros(1))
    assert Replayed.made == 3, "1 was used after 2"
    graphs.run(A, 2, lambda: torch.zeros(1))
    assert Replayed.made == 4


def test_no_more_are_recorded_beyond_their_share_of_memory() -> None:
    graphs = DecodeGraphs(Replayed, nbytes=150)
    for bucket in (1, 1, 2, 2, 4, 4, 4):
        assert graphs.run(A, bucket, lambda: torch.ones(1)).tolist() == [1]
    assert (graphs.count, graphs.nbytes) == (2, 200)


def test_what_cannot_be_recorded_is_run_as_it_is() -> None:
    graphs = DecodeGraphs(unrecordable)
    for _ in range(4):
        assert graphs.run(A, 1, lambda: torch.ones(1)).tolist() == [1]
    assert graphs.count == 0


class Allocator:
    """torch's, as far as it keeps accounts of the pools of graphs (`CUDACachingAllocator.cpp`, `CUDAGraph.cpp`). It
    raises where torch has an internal error."""

    def __init__(self) -> None:
        self.graphs: dict[int, int] = {}  # by pool
        self.recording = set[int]()  # pools
        self.breaks = False  # the recording under way
        self.reserved = 0
        self.others = 0  # bytes of other processes
        self._handles = count(1)

    def handle(self) -> int:
        return next(self._handles)

    def end(self, _: int, pool: int) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)


class Graph:
    allocator: Allocator

    def __init__(self) -> None:
        self._pool = 0
        self._ended = False

    def capture_begin(self, *, pool: int, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        allocator = self.allocator
        if allocator.graphs.get(pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        allocator.graphs[pool] = allocator.graphs.get(pool, 0) + 1
        if pool in allocator.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        allocator.recording.add(pool)
        self._pool = pool

    def capture_end(self) -> None:
        if self.allocator.breaks:
            self.allocator.breaks = False
            raise RuntimeError("operation failed due to a previous error during capture")
        self.allocator.end(0, self._pool)
        self._ended = True

    def replay(self) -> None:
        assert self._ended

    def __del__(self) -> None:
        if self._ended:
            self.allocator.graphs[self._pool] -= 1


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    allocator = Graph.allocator = Allocator()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", allocator.handle)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (-allocator.reserved - allocator.others, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: allocator.reserved)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", allocator.end, raising=False)
    return allocator


def recorded(graphs: DecodeGraphs, model: ModelId, forward: Forward) -> int:
    """The number of recordings after the model has run twice."""
    for _ in range(2):
        graphs.run(model, 1, forward)
    return graphs.count


def test_steps_are_recorded_after_every_model_with_recordings_has_left(allocator: Allocator) -> None:
    output = torch.ones(1)
    graphs = DecodeGraphs(CudaRecorder(torch.device("cpu")))
    for model in (A, B, A):
        assert recorded(graphs, model, lambda: output) == 1
        graphs.drop(model)
    assert graphs.count == 0


def test_a_model_whose_recording_breaks_keeps_no_other_from_being_recorded(allocator: Allocator) -> None:
    output = torch.ones(1)
    runs = []

    def breaking() -> torch.Tensor:
        runs.append(1)
        if len(runs) == 2:
            allocator.breaks = True
            raise RuntimeError("operation not permitted when stream is capturing")
        return output

    graphs = DecodeGraphs(CudaRecorder(torch.device("cpu")))
    assert recorded(graphs, A, breaking) == 0
    assert len(runs) == 3, "it is run as it is"
    assert not allocator.recording
    assert recorded(graphs, B, lambda: output) == 1
    assert recorded(graphs, A, breaking) == 1, "it is not tried again"


@pytest.mark.parametrize(("own", "driver", "others"), [(5 << 20, 1 << 20, 0), (0, 0, 3 << 30), (0, 0, -(3 << 30))])
def test_what_others_on_the_gpu_take_meanwhile_is_no_recordings(
    own: int, driver: int, others: int, allocator: Allocator
) -> None:
    """Their 3 GiB, counted as a graph's, would be more than graphs may take: there would be no other graph."""
    output = torch.ones(1)
    runs = []

    def forward() -> torch.Tensor:
        runs.append(1)
        if len(runs) == 2:
            allocator.reserved += own
            allocator.others += driver + others
        return output

    graphs = DecodeGraphs(CudaRecorder(torch.device("cpu")))
    assert recorded(graphs, A, forward) == 1
    assert graphs.nbytes == own + driver or (others and graphs.nbytes <= DRIVER_BYTES)
    assert recorded(graphs, B, lambda: output) == 2
