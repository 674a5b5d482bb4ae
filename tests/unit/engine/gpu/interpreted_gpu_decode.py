"""The engine's decode steps as a GPU runs them, on CPU tensors, against transformers. See `test_triton_attention`."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from aegis.core.request import Sampling
from aegis.engine.gpu import decode_inputs
from aegis.engine.gpu.cuda_graphs import DecodeGraphs
from aegis.engine.gpu.decode import GpuDecoder
from aegis.engine.transformers_engine import TransformersEngine
from tests.long_forms import first_of
from tests.unit.engine.generation import GREEDY, begin, step
from tests.unit.engine.gpu.test_cuda_graphs import Replayed
from tests.unit.engine.images import Arena, Built
from tests.unit.engine.test_shared_steps import Together, drawn
from tests.unit.engine.test_transformers_engine import VOCAB, make

assert os.environ["TRITON_INTERPRET"] == "1"

CPU = torch.device("cpu")


def generate(built: Built, decoder: GpuDecoder | None, lengths: list[int], steps: int) -> list[list[int]]:
    """Tokens of sequences that join one after the other, so that batches of all sizes occur."""
    arena = Arena()
    engine = TransformersEngine(arena.region, decoder=decoder)
    engine.attach(built.spec, built.base)
    draws = random.Random(1)
    runs = []
    for number, length in enumerate(lengths):
        prompt = [draws.randrange(3, VOCAB) for _ in range(length)]
        sampling = Sampling(max_tokens=99, temperature=0.8 * (number % 2), seed=number)
        runs.append(begin(engine, arena, built, number, prompt, room=steps * len(lengths) + 1, sampling=sampling))
        step(engine, runs, steps)
    engine.detach(built.spec.model)
    return [run.ids for run in runs]


@pytest.mark.parametrize("name", first_of(1, ["gpt_oss", "deepseek_v3", "opt"]))
def test_decodes_what_the_gathering_decoder_does(name: str, tmp_path: Path) -> None:
    built = make(name, tmp_path / name)
    lengths = [15, 1]
    graphs = DecodeGraphs(Replayed)
    by_tables = generate(built, GpuDecoder(CPU, graphs=graphs), lengths, 1)
    assert by_tables == generate(built, None, lengths, 1)
    assert graphs.count == 0, "a detached model keeps no graphs"


@pytest.mark.long
def test_a_step_too_large_for_the_tables_is_done_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = make("llama", tmp_path / "llama")
    monkeypatch.setattr(decode_inputs, "BUCKETS", (1, 2))
    assert generate(built, GpuDecoder(CPU), [3, 20, 1], 1) == generate(built, None, [3, 20, 1], 1)


@pytest.mark.long
def test_rows_beside_a_prompt_make_what_they_make_alone(tmp_path: Path) -> None:
    built = make("gemma2", tmp_path / "gemma2")
    arena = Arena()
    engine = TransformersEngine(arena.region, decoder=GpuDecoder(CPU))
    engine.attach(built.spec, built.base)
    together = Together(engine, arena, built, 7)
    for number, length in enumerate((3, 5, 18)):
        together.join(drawn(length, number), GREEDY)
        together.step()
    for _ in range(3):
        together.step()
    assert together.mixed > 2
    for run in together.runs:
        assert run.ids == built.greedy(run.prompt, len(run.ids)) and run.ids
