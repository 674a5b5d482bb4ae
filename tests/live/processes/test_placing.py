"""A server that migrates: models that have no time on one device go to another one by themselves, and no stream is
disturbed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.checkpoints import VOCAB_SIZE
from tests.live.ctl import ctl
from tests.live.market import MARKET
from tests.live.server import START_S, Server, launched
from tests.live.streams import Body, Stream, run_all, until

MODELS = list(MARKET)[:2]
STREAMS, TOKENS = 8, 700
_OPTIONS = ("--dtype", "float32", "--device-memory", "96MiB", "--host-memory", "64MiB", "--debug-memory", "--migrate")
_OPTIONS += ("--mixed", "2", "--devices", "2", "--slo", "ttft=10,tbt=0.001")
"""So that a step of a model alone wants more time than a device has."""


def bodies() -> list[Body]:
    asked = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    prompts = [[(17 * n + at * at) % VOCAB_SIZE for at in range(1 + 9 * n)] for n in range(STREAMS)]
    return [{"model": MODELS[n % 2], "prompt": prompt} | asked for n, prompt in enumerate(prompts)]


def answers(streams: Sequence[Stream]) -> list[list[int]]:
    assert [stream.error for stream in streams] == [None] * STREAMS
    assert [len(stream.tokens) for stream in streams] == [TOKENS] * STREAMS
    return [stream.tokens for stream in streams]


def gather(server: Server) -> None:
    """All that comes goes to the first instance."""
    for model in MODELS:
        assert ctl(server, "move", model, "mixed-0").returncode == 0


def test_a_model_leaves_a_device_that_has_no_time_for_it(tmp_path: Path, cache: Path, checkpoints_dir: Path) -> None:
    models = [option for model in MODELS for option in ("--models", str(checkpoints_dir / model))]
    with launched(tmp_path, cache, *models, *_OPTIONS) as server:
        server.wait_for_ready()

        async def has_moved(streams: Sequence[Stream]) -> None:
            await until(lambda: "a model has moved" in server.output(), "a model moves")

        gather(server)
        streams = run_all(server.url, bodies(), has_moved)
        first = answers(streams)
        (moves, done) = (
            [line for line in server.output().splitlines() if said in line]
            for said in ("a model moves", "a model has moved")
        )
        assert len(moves) == 1 and "instance=mixed-1" in moves[0] and "mixed-0's device wants" in moves[0]
        assert f"moved={STREAMS // 2}" in done[0]
        assert all(server.metrics().total("instance_steps_total", instance=f"mixed-{n}") for n in range(2))
        server.wait_for_freed_memory()
        assert answers(run_all(server.url, bodies())) == first


def test_a_policy_that_moves_nothing_says_so(tmp_path: Path, cache: Path, checkpoints_dir: Path) -> None:
    options = ["--models", str(checkpoints_dir), "--policy", "aegaeon", "--migrate"]
    with launched(tmp_path, cache, *options) as server:
        assert server.process.wait(START_S) == 2
        said = "aegis: policy 'aegaeon' does not move models: leave out --migrate, or take least-slack"
        assert said in server.output()
