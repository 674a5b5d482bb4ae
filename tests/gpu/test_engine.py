"""The engine on a GPU: what transformers computes, with and without graphs, and waiting for the GPU once a step."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from aegis.core.ids import ModelId
from aegis.core.model import KvLayer, KvShape
from aegis.core.request import Sampling
from aegis.device.cuda.device import CudaDevice
from aegis.device.protocol import Lane
from aegis.engine.gpu.cuda_graphs import CudaRecorder, DecodeGraphs
from aegis.engine.gpu.decode import GpuDecoder
from aegis.engine.lane_threads import compute_in
from aegis.engine.paged_attention import Kind, Prefill
from aegis.engine.sampler import Sampler
from aegis.engine.scratch import Scratch
from aegis.engine.tensor_views import KvViews
from aegis.engine.transformers_engine import TransformersEngine
from tests.unit.engine.generation import Generation, begin, step
from tests.unit.engine.images import Arena, Built
from tests.unit.engine.test_transformers_engine import ARCHITECTURES, NEW_TOKENS, make, prompts

SAMPLINGS = [
    Sampling(max_tokens=99, temperature=0.0),
    Sampling(max_tokens=99, seed=1, temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, logprobs=3),
    Sampling(max_tokens=99, seed=2, presence_penalty=0.5, repetition_penalty=1.2, logit_bias=((5, 1.0),), min_tokens=9),
]


class Loaded:
    """A model whose image is in GPU memory, attached to an engine of its own."""

    def __init__(self, built: Built, decoder: GpuDecoder | None = None) -> None:
        self._weights = torch.from_numpy(built.image).cuda()
        self._built = built
        self.arena = Arena(device="cuda")
        self.engine = TransformersEngine(self.arena.region, device="cuda", decoder=decoder)
        self.engine.attach(built.spec, self._weights.data_ptr())

    def begin(self, number: int, prompt: list[int], sampling: Sampling = SAMPLINGS[0]) -> Generation:
        return begin(self.engine, self.arena, self._built, number, prompt, room=60, sampling=sampling)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equals_transformers_on_a_cpu(name: str, tmp_path: Path) -> None:
    built = make(name, tmp_path / name)
    loaded = Loaded(built)
    runs = [loaded.begin(number, prompt) for number, prompt in enumerate(prompts(1))]
    step(loaded.engine, runs, NEW_TOKENS - 1)
    assert [run.ids for run in runs] == [built.greedy(run.prompt, NEW_TOKENS) for run in runs]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_graphs_change_no_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    """Logprobs are exact images of logits. Rows join, so that several buckets are recorded and replayed in turn."""
    built = make("llama", tmp_path / "llama", std=0.05, dtype=dtype)
    told = []
    for decoder in (GpuDecoder(torch.device("cuda")), None):
        loaded, runs = Loaded(built, decoder), list[Generation]()
        for number, prompt in enumerate(prompts(3)):
            runs.append(loaded.begin(number, prompt, Sampling(max_tokens=99, temperature=0.0, logprobs=5)))
            step(loaded.engine, runs, 5)
            step(loaded.engine, runs[:1], 3)
        told.append([run.tokens for run in runs])
        graphs = loaded.engine.decoder and loaded.engine.decoder.graphs
        assert (graphs is None) == (decoder is not None)
        assert graphs is None or graphs.count >= 3
    assert told[0] == told[1]


def test_steps_are_recorded_after_recordings_that_were_dropped_or_broke() -> None:
    graphs, zeros = DecodeGraphs(CudaRecorder(torch.device("cuda"))), torch.zeros(4, device="cuda")
    torch.cuda.synchronize()

    def waits() -> torch.Tensor:
        return zeros + zeros.sum().item()

    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for number, forward in enumerate([zeros.exp, zeros.exp, waits, zeros.exp, waits, zeros.exp]):
            model = ModelId(f"model {number}")
            made = [graphs.run(model, 1, forward).tolist() for _ in range(3)]
            assert made == [[float(forward == zeros.exp)] * 4] * 3
            assert graphs.count == int(forward == zeros.exp)
            graphs.drop(model)


def test_nothing_runs_any_more_when_a_step_has_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded = Loaded(make("llama", tmp_path / "llama"))
    run = loaded.begin(0, prompts(1)[3])

    def fail(*_: object) -> None:
        torch.cuda._sleep(1 << 30)  # type: ignore[no-untyped-call]
        raise ValueError("a grammar")

    monkeypatch.setattr(Sampler, "sample", fail)
    with pytest.raises(ValueError, match="a grammar"):
        step(loaded.engine, [run], 1)
    assert loaded.engine._computing._stream.query()


@pytest.mark.parametrize("mixed", [False, True])
def test_a_step_waits_for_the_gpu_once(mixed: bool, tmp_path: Path) -> None:
    loaded = Loaded(make("llama", tmp_path / "llama"))
    samplings = SAMPLINGS if mixed else SAMPLINGS[:1]
    runs = [loaded.begin(number, prompts(4)[number], sampling) for number, sampling in enumerate(samplings)]
    step(loaded.engine, runs, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step(loaded.engine, runs, 13)  # in which a block begins
        torch.cuda.set_sync_debug_mode("default")
    assert len([each for each in caught if "synchroniz" in str(each.message)]) == 13


def test_a_long_prompt_needs_no_matrix_of_scores() -> None:
    """One head's, of 8192 tokens, would take 64 MiB at a byte each."""
    tokens, shape = 8192, KvShape((KvLayer(2, 128, 128),), "bfloat16", 2)
    arena = Arena(slab_bytes=64 * shape.block_bytes, slabs=10, device="cuda")
    prefill = Prefill(
        KvViews(arena.region, shape, torch.device("cuda")), Scratch(), 0, tokens, arena.take(shape, tokens)
    )
    query, key, value = (torch.randn(1, heads, tokens, 128, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    prefill.attend(0, query, key, value, Kind(None, None, None, None))
    assert torch.cuda.max_memory_allocated() - before < 64 << 20


def test_two_lanes_make_the_tokens_that_the_whole_gpu_makes(device: CudaDevice, tmp_path: Path) -> None:
    """Prompts with few layers before the GPU at a time, and graphs of each lane's own."""
    built = make("llama", tmp_path / "llama")
    loaded = Loaded(built)
    begun = [loaded.begin(number, prompts(number)[2]) for number in range(4)]

    def generate(lane: Lane, runs: list[Generation]) -> None:
        compute_in(lane)
        step(loaded.engine, runs, NEW_TOKENS - 1)
        runs.append(loaded.begin(10 + runs[0].request, prompts(9)[3]))

    lanes = device.lanes(device.partitions()[1])
    with ThreadPoolExecutor(2) as pool:
        halves = [begun[:2], begun[2:]]
        for future in [pool.submit(generate, lane, runs) for lane, runs in zip(lanes, halves, strict=True)]:
            future.result(120)
    for half in halves:
        assert [run.ids for run in half[:2]] == [built.greedy(run.prompt, NEW_TOKENS) for run in half[:2]]
        assert half[2].ids == built.greedy(half[2].prompt, 1)
    for lane in lanes:
        lane.close()
