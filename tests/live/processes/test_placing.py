"""A server that migrates: models that have no time on one device go to another one by themselves, and no stream is
disturbed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.checkpoints import VOCAB_SIZE
from tests.live.ctl import ctl
from tests.live.market import MARKET, Reference
from tests.live.server import START_S, Server, eventually, launched
from tests.live.streams import Body, Stream, run_again, until

MODELS = list(MARKET)[:2]
STREAMS, TOKENS = 8, 300
_OPTIONS = ("--dtype", "float32", "--device-memory", "96MiB", "--host-memory", "64MiB", "--debug-memory")
_OPTIONS += ("--mixed", "2", "--devices", "2", "--slo", "ttft=10,tbt=0.001")
"""So that a step of a model alone wants more time than a device has."""


def bodies() -> list[Body]:
    asked = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    prompts = [[(17 * n + at * at) % VOCAB_SIZE for at in range(1 + 9 * n)] for n in range(STREAMS)]
    return [{"model": MODELS[n % 2], "prompt": prompt} | asked for n, prompt in enumerate(prompts)]


def gather(server: Server) -> None:
    """All that comes goes to the first instance."""
    for model in MODELS:
        assert ctl(server, "move", model, "mixed-0").returncode == 0


@pytest.mark.long
def test_a_model_leaves_a_device_that_has_no_time_for_it(
    tmp_path: Path, cache: Path, checkpoints_dir: Path, references: dict[str, Reference]
) -> None:
    models = [option for model in MODELS for option in ("--models", str(checkpoints_dir / model))]
    greedy = {body["model"]: references[body["model"]].greedy for body in bodies()}
    expected = [greedy[b["model"]](b["prompt"], max_tokens=TOKENS, ignore_eos=True).tokens for b in bodies()]
    with launched(tmp_path, cache, *models, *_OPTIONS) as server:
        server.wait_for_ready()
        gather(server)

        async def moved(_: Sequence[Stream]) -> None:
            await until(lambda: "a model has moved" in server.output(), "a model has moved")

        asked = run_again(server.url, bodies(), moved)
        assert [stream.error for _, stream in asked] == [None] * len(asked)
        assert all(stream.done and stream.tokens == expected[number] for number, stream in asked)
        (moves,) = [line for line in server.output().splitlines() if "a model moves" in line]
        assert "instance=mixed-1" in moves and "mixed-0's device wants" in moves
        assert all(server.metrics().total("instance_steps_total", instance=f"mixed-{n}") for n in range(2))
        server.wait_for_freed_memory()


def test_weights_of_a_model_that_nobody_asks_for_leave_and_come_back(
    tmp_path: Path, cache: Path, checkpoints_dir: Path
) -> None:
    config = tmp_path / "aegis.yaml"
    config.write_text("scheduling: {model_idle_s: 1.5}\n")
    options = ["--models", str(checkpoints_dir / MODELS[0]), "--dtype", "float32", "--device-memory", "96MiB"]
    with launched(tmp_path, cache, *options, "--mixed", "1", "--config", str(config)) as server:
        server.wait_for_ready()

        def weights() -> int:
            return server.metrics().total("memory_device_pages_weights", instance="mixed-0")

        for _ in range(2):
            assert server.post("/v1/completions", bodies()[0] | {"max_tokens": 2}).status_code == httpx.codes.OK
            eventually(weights, "they are there")
            eventually(lambda: not weights(), "they leave")


def test_a_policy_that_moves_nothing_says_so(tmp_path: Path, cache: Path, checkpoints_dir: Path) -> None:
    options = ["--models", str(checkpoints_dir), "--policy", "aegaeon", "--migrate"]
    with launched(tmp_path, cache, *options) as server:
        assert server.process.wait(START_S) == 2
        said = "aegis: policy 'aegaeon' does not move models: leave out --migrate, or take least-slack"
        assert said in server.output()
