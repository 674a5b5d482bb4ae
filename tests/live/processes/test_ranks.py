"""Instances of two processes each, which share every model out: what they serve and refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import checkpoints
from tests.live.market import Reference
from tests.live.server import SPLIT, Server, launched

SERVED = ("llama", "mixtral")
ENDLESS = {"max_position_embeddings": 512}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    for model_type in SERVED:
        checkpoints.write(root / model_type, model_type, **ENDLESS)
    checkpoints.write(root / "one-head", "llama", num_key_value_heads=1)
    checkpoints.write(root / "no-plan", "gpt2")
    return root


@pytest.fixture(scope="module")
def pair(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--models", str(directory), "--dtype", "float32", "--device-memory", "64MiB", "--debug-memory"]
    options += ["--tensor-parallel-size", "2", *SPLIT]
    path = tmp_path_factory.mktemp("pair")
    with launched(path, path / "cache", *options) as running:
        running.wait_for_ready()
        yield running


def test_what_cannot_be_shared_out_is_refused(pair: Server) -> None:
    assert "LlamaForCausalLM has 1 head of KV in a layer, which 2 ranks cannot share" in pair.output()
    assert "GPT2LMHeadModel has no plan for tensor parallelism" in pair.output()


def test_the_logprobs_of_a_prompt_are_those_of_transformers(pair: Server, directory: Path) -> None:
    prompt = [5, 60, 200, 9, 30]
    body = {"model": "llama", "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1}
    (choice,) = pair.post("/v1/completions", body).json()["choices"]
    expected = Reference(directory / "llama").logprobs(prompt)
    said = choice["logprobs"]["token_logprobs"][1 : len(prompt)]
    assert said == pytest.approx([float(expected[i, token]) for i, token in enumerate(prompt[1:])], abs=1e-3)
