"""A prompt that begins like an earlier request is prefilled from where it differs, and answered as if it were not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live.market import MARKET, Reference
from tests.live.server import Server, eventually, launched
from tests.live.streams import Body, run_all

BLOCK = 16
ANSWER = 24


@pytest.fixture(scope="module", params=["split", pytest.param("mixed", marks=pytest.mark.long)])
def reusing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path
) -> Iterator[Server]:
    if request.param == "split":
        yield request.getfixturevalue("roomy")
        return
    options = ["--models", str(checkpoints_dir), "--dtype", "float32", "--device-memory", "64MiB", "--debug-memory"]
    with launched(tmp_path_factory.mktemp("prefix"), cache, *options, "--mixed", "2") as running:
        running.wait_for_ready()
        yield running


def complete(server: Server, model: str, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"max_tokens": ANSWER, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    reply = server.post("/v1/completions", {"model": model, "prompt": prompt, **body, **more})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def tokens_of(reply: dict[str, Any], choice: int = 0) -> list[int]:
    return list(reply["choices"][choice]["token_ids"])


def cached(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def clear_prompt(reference: Reference, *of: object, begin: list[int], tokens: int) -> tuple[list[int], list[int]]:
    """A prompt of so many more tokens whose greedy answer does not hang on rounding, and that answer."""
    names = ("prefix", *map(str, of))
    prompt, greedy = reference.clear_case(*names, length=tokens, max_tokens=ANSWER, begin=begin, ignore_eos=True)
    return prompt, greedy.tokens


def kept(server: Server) -> int:
    return server.metrics().total("prefix_kept_blocks_total")


@pytest.mark.parametrize("model", ["llama", "mistral", "gemma2"])
def test_a_second_turn_goes_on_from_the_first(reusing: Server, references: dict[str, Reference], model: str) -> None:
    """Of windows too: the KV of all positions is kept."""
    first, answer = clear_prompt(references[model], model, 1, begin=[], tokens=300)
    before = kept(reusing)
    reply = complete(reusing, model, first)
    assert tokens_of(reply) == answer and cached(reply) == 0
    whole = (len(first) + ANSWER - 1) // BLOCK * BLOCK  # the KV of the last token was never made
    second, answer = clear_prompt(references[model], model, 2, begin=first + answer, tokens=37)
    eventually(lambda: kept(reusing) > before, "the first is kept")
    reply = complete(reusing, model, second)
    assert tokens_of(reply) == answer
    assert cached(reply) == whole


def test_another_instance_goes_on_from_what_a_lost_one_made(reusing: Server, references: dict[str, Reference]) -> None:
    first, answer = clear_prompt(references["qwen3"], "lost", 1, begin=[], tokens=200)
    before = kept(reusing)
    complete(reusing, "qwen3", first)
    eventually(lambda: kept(reusing) >= before + 200 // BLOCK, "the first is kept")
    for instance in reusing.metrics().instances():
        os.kill(reusing.pid_of(instance), signal.SIGKILL)
    eventually(lambda: not reusing.ready(), "the loss is noticed")
    reusing.wait_for_ready()
    second, answer = clear_prompt(references["qwen3"], "lost", 2, begin=first + answer, tokens=20)
    reply = complete(reusing, "qwen3", second)
    assert tokens_of(reply) == answer
    assert cached(reply) == (len(first) + ANSWER - 1) // BLOCK * BLOCK


def test_choices_of_one_request_are_prefilled_once(reusing: Server, references: dict[str, Reference]) -> None:
    def prefilled() -> int:
        return reusing.metrics().total("instance_prompt_tokens_total")

    prompt, answer = clear_prompt(references["phi3"], "choices", begin=[], tokens=333)
    reusing.wait_for_freed_memory()
    before = prefilled()
    reply = complete(reusing, "phi3", prompt, n=4)
    assert [tokens_of(reply, choice) for choice in range(4)] == [answer] * 4
    assert cached(reply) == 0 and reply["usage"]["prompt_tokens"] == len(prompt)
    reusing.wait_for_freed_memory()
    assert prefilled() - before == len(prompt) + 3, "each further choice runs the last token"


def test_a_prompt_whose_logprobs_are_wanted_is_run(reusing: Server, references: dict[str, Reference]) -> None:
    prompt, _ = clear_prompt(references["granite"], "echo", begin=[], tokens=100)
    before = kept(reusing)
    complete(reusing, "granite", prompt)
    eventually(lambda: kept(reusing) > before, "it is kept")
    reply = complete(reusing, "granite", prompt, echo=True, logprobs=0)
    assert cached(reply) == 0
    scores = references["granite"].logprobs(prompt)
    expected = [float(scores[at, token]) for at, token in enumerate(prompt[1:])]
    assert reply["choices"][0]["logprobs"]["token_logprobs"][1 : len(prompt)] == pytest.approx(expected, abs=1e-3)
    assert cached(complete(reusing, "granite", prompt)) == 96


@pytest.mark.long
def test_each_rank_reuses_its_own_part(
    tmp_path: Path, cache: Path, checkpoints_dir: Path, references: dict[str, Reference]
) -> None:
    options = ["--models", str(checkpoints_dir / "llama"), "--dtype", "float32", "--device-memory", "64MiB"]
    with launched(tmp_path, cache, *options, "--mixed", "1", "--tensor-parallel-size", "2") as server:
        server.wait_for_ready()
        first, answer = clear_prompt(references["llama"], "ranks", 1, begin=[], tokens=150)
        assert tokens_of(complete(server, "llama", first)) == answer
        eventually(lambda: kept(server), "the first is kept")
        second, answer = clear_prompt(references["llama"], "ranks", 2, begin=first + answer, tokens=20)
        reply = complete(server, "llama", second)
        assert tokens_of(reply) == answer and cached(reply) == (len(first) + ANSWER - 1) // BLOCK * BLOCK


@pytest.fixture(scope="module")
def pressed(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path, tight_memory: str
) -> Iterator[Server]:
    """Of eight models two fit the device, and host memory holds hardly a slab for each of their shapes. Two proxies."""
    options = ["--models", str(checkpoints_dir), "--dtype", "float32", "--device-memory", tight_memory]
    options += ["--host-memory", "36MiB", "--model-cache", "20MiB", "--slo", "ttft=1,tbt=0.1", "--debug-memory"]
    with launched(tmp_path_factory.mktemp("pressed"), cache, *options, "--mixed", "2", "--proxies", "2") as running:
        running.wait_for_ready()
        yield running


@pytest.mark.long
def test_conversations_stay_exact_while_memory_is_short_and_models_change(
    pressed: Server, references: dict[str, Reference]
) -> None:
    """Three turns of two conversations with each of eight models, all at once; then one again, alone, through both
    proxies."""
    turns = {(model, number): list[int]() for model in MARKET for number in range(2)}
    for turn in range(3):
        cases = {
            (model, number): clear_prompt(references[model], model, number, turn, begin=begin, tokens=90)
            for (model, number), begin in turns.items()
        }
        ask: Body = {"max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
        bodies = [ask | {"model": model, "prompt": prompt} for (model, _), (prompt, _) in cases.items()]
        streams = run_all(pressed.url, bodies)
        for stream, (_, answer) in zip(streams, cases.values(), strict=True):
            assert stream.error is None and stream.tokens == answer, stream.body["model"]
        turns = {which: prompt + answer for which, (prompt, answer) in cases.items()}
    metrics = pressed.metrics()
    assert metrics.total("prefix_hits_total") and metrics.total("prefix_evicted_blocks_total")
    assert metrics.total("instance_preemptions_total") and metrics.total("model_switches_total") > 8
    prompt = turns["llama", 0]
    complete(pressed, "llama", prompt)
    pressed.wait_for_freed_memory()  # what is to be kept counts until it has been written
    proxies = set()
    for _ in range(12):
        reply = pressed.post("/v1/completions", {"model": "llama", "prompt": prompt, "max_tokens": 1})
        assert cached(reply.json()) == (len(prompt) - 1) // BLOCK * BLOCK
        proxies.add(reply.headers["x-aegis-proxy"])
    assert len(proxies) == 2
