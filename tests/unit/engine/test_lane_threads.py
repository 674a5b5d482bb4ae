"""Steps on two lanes side by side, in two threads: tokens are what each lane makes alone."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from aegis.core.model import KvShape
from aegis.device.cpu.lanes import CpuLane
from aegis.engine.block_table import BlockTable
from aegis.engine.lane_threads import Computing, Decoders, compute_in
from aegis.engine.paged_attention import Kind, running
from aegis.engine.parallel.group import RanksLost
from aegis.engine.transformers_engine import TransformersEngine
from tests.long_forms import first_of
from tests.unit.engine.generation import Generation, begin, step
from tests.unit.engine.images import Arena, Built, build
from tests.unit.engine.test_transformers_engine import NEW_TOKENS, VOCAB, make, prompts

LANE = CpuLane(500, 1, frozenset(os.sched_getaffinity(0)))


@pytest.fixture(autouse=True)
def threads_change_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class SharedArena(Arena):
    """One thread at a time takes blocks: in an instance the core alone gives them."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def take(self, shape: KvShape, tokens: int) -> BlockTable:
        with self._lock:
            return super().take(shape, tokens)


def side_by_side(*works: Callable[[], None]) -> None:
    """Each in a lane of its own. All begin at once."""
    begin_at_once = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        compute_in(LANE)
        begin_at_once.wait(30)
        work()

    with ThreadPoolExecutor(len(works)) as pool:
        for future in [pool.submit(run, work) for work in works]:
            future.result(60)


@pytest.mark.parametrize("name", first_of(2, ["llama", "qwen3", "gemma2", "gpt2", "gpt_oss", "mixtral"]))
def test_prompts_and_steps_beside_each_other_change_no_token(name: str, tmp_path: Path) -> None:
    built = make(name, tmp_path / name)
    arena = SharedArena()
    engine = TransformersEngine(arena.region)
    engine.attach(built.spec, built.base)
    runs = list[Generation]()

    def generate(numbers: range) -> None:
        for number in numbers:
            asked = prompts(number)
            own = [begin(engine, arena, built, 100 * number + at, prompt, room=60) for at, prompt in enumerate(asked)]
            step(engine, own, NEW_TOKENS - 1)
            runs.extend(own)

    side_by_side(lambda: generate(range(3)), lambda: generate(range(3, 6)))
    assert len(runs) == 6 * len(prompts(0))
    for run in runs:
        assert run.ids == built.greedy(run.prompt, NEW_TOKENS)


@pytest.mark.parametrize(("rope", "at_once"), [({}, True), ({"rope_type": "dynamic", "factor": 2.0}, False)])
def test_a_model_whose_frequencies_are_set_in_each_step_is_run_by_one_lane_at_a_time(
    rope: dict[str, object], at_once: bool, tmp_path: Path
) -> None:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        rope_scaling=rope | {"rope_theta": 10000.0} if rope else None,
    )
    built = build(config, tmp_path / "model")
    arena = SharedArena()
    engine = TransformersEngine(arena.region)
    engine.attach(built.spec, built.base)
    inside, met = threading.Barrier(2), list[bool]()

    def meet(*_: object) -> None:
        """Whether a step of the other lane is in the model as well."""
        try:
            inside.wait(5 if at_once else 0.3)
        except threading.BrokenBarrierError:
            met.append(False)
        else:
            met.append(True)

    engine._models[built.spec.model].module.register_forward_pre_hook(meet)
    short, long = list(range(3, 9)), [at % 190 for at in range(3, 93)]
    runs = list[Generation]()
    side_by_side(*[lambda p=p: runs.append(begin(engine, arena, built, len(p), p, room=20)) for p in (short, long)])
    assert met == [at_once, at_once]
    for run in runs:
        assert run.ids == built.greedy(run.prompt, 1)


def test_each_lane_computes_with_its_own_number_of_threads() -> None:
    before = torch.get_num_threads()
    seen = dict[int, int]()
    both_entered = threading.Barrier(2)

    def enter(threads: int) -> None:
        compute_in(CpuLane(500, threads, LANE.cores))
        both_entered.wait(30)
        torch.ones(1000).sum()
        seen[threads] = torch.get_num_threads()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(enter, (1, 3)))
    assert seen == {1: 1, 3: 3}
    assert torch.get_num_threads() == before


def test_what_is_to_be_done_between_layers_is_done_once_in_each(tmp_path: Path) -> None:
    class Attending:
        attended = 0

        def attend(
            self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kind: Kind
        ) -> torch.Tensor:
            layers.append(f"layer {layer}")
            return query.transpose(1, 2)

    built: Built = make("llama", tmp_path / "llama")
    module = built.reference
    module.set_attn_implementation("aegis_paged")
    layers = list[str]()
    with running(Attending(), lambda: layers.append("between")):
        module(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    assert layers == ["layer 0", "between", "layer 1", "between"]


@pytest.mark.parametrize(("error", "waits"), [(ValueError("a grammar"), True), (RanksLost(), False)])
def test_what_a_failed_step_launched_has_been_run(
    error: BaseException, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests fail, and pages that kernels still wrote to would be unmapped under them."""

    class Stream:
        waited = False

        def synchronize(self) -> None:
            self.waited = True

    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    computing, stream = Computing(torch.device("cpu"), None, Decoders()), Stream()
    computing._stream = stream
    with computing.on_stream():
        pass
    assert not stream.waited, "the sampler waits, once"
    with pytest.raises(type(error)), computing.on_stream():
        raise error
    assert stream.waited == waits


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_cudnn_attends_in_no_step_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes a plan for every new length of a prompt or a piece. The setting is torch's, for the whole process."""
    from aegis.engine.gpu.decode import GpuDecoder

    before = torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(torch.cuda, "Stream", nullcontext)
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        Computing(torch.device("cuda"), GpuDecoder(torch.device("cpu")), Decoders())
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_inputs_of_steps_are_zeroed_on_the_stream_that_writes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On another one, zeros could come after what the first step was sent: nothing orders the two."""
    from aegis.engine.gpu.decode import GpuDecoder

    current, seen = list[object](), list[object]()

    @contextmanager
    def entered(stream: object) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def on_cuda(device: torch.device) -> GpuDecoder:
        seen.extend(current)
        return GpuDecoder(torch.device("cpu"))

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "its own")
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(GpuDecoder, "on_cuda", on_cuda)
    Computing(torch.device("cuda"), None, Decoders())
    assert seen == ["its own"]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_lane_on_another_gpu_makes_no_context_on_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sets the device whose stream is entered or left, if it is not the thread's; from CUDA 12 on that makes its
    context, which takes half a GiB."""
    from aegis.engine.gpu.decode import GpuDecoder

    contexts = set[int]()

    class Here(threading.local):
        gpu = 0

        def set(self, gpu: int) -> None:
            if self.gpu != gpu:
                self.gpu = gpu
                contexts.add(gpu)

    here = Here()

    @contextmanager
    def entered(stream: int) -> Iterator[None]:
        before = here.gpu
        here.set(stream)
        yield
        here.set(before)

    def step() -> None:
        compute_in(LANE)
        with Computing(torch.device("cuda:3"), None, Decoders()).on_stream():
            pass

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: here.set(device.index))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda _, device: device.index)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(GpuDecoder, "on_cuda", lambda _: GpuDecoder(torch.device("cpu")))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(step).result(60)
    assert contexts == {3}
