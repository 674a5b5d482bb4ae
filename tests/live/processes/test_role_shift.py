"""If prefill is short of instances, a decode instance changes its role by itself, and no stream is disturbed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.live.market import MARKET
from tests.live.server import START_S, launched
from tests.live.streams import Body, Stream, client_of, run_all, until

MODELS = list(MARKET)[:2]
CLIENTS = 24
PROMPT_TOKENS = 1000
_OPTIONS = ("--dtype", "float32", "--device-memory", "128MiB", "--debug-memory", "--prefix-reuse", "off")
_OPTIONS += ("--prefill", "1", "--decode", "2", "--change-roles", "--slo", "ttft=0.1,tbt=10")
"""So a short queue is too long for prefill, and decode has time."""


def _bodies() -> list[Body]:
    asked = {"max_tokens": 3, "ignore_eos": True, "temperature": 0}
    return [{"model": MODELS[n % 2], "prompt": [5 + n] * PROMPT_TOKENS} | asked for n in range(4)]


@pytest.mark.long
def test_a_decode_instance_goes_to_prefill_where_requests_wait_for_that(
    tmp_path: Path, cache: Path, checkpoints_dir: Path
) -> None:
    models = [option for model in MODELS for option in ("--models", str(checkpoints_dir / model))]
    with launched(tmp_path, cache, *models, *_OPTIONS) as server:
        server.wait_for_ready()
        expected = [stream.tokens for stream in run_all(server.url, _bodies())]
        assert [len(tokens) for tokens in expected] == [3] * len(expected)

        def roles() -> dict[str, str]:
            now: dict[str, str] = server.get("/debug/node").json()["instances"]
            return now

        async def load() -> list[tuple[int, Stream]]:
            """As many clients that always ask, until an instance has changed and all serve again."""
            asked: list[tuple[int, Stream]] = []
            changed = asyncio.Event()

            async def ask(number: int) -> None:
                while not changed.is_set():
                    stream = Stream(_bodies()[number % len(expected)])
                    asked.append((number % len(expected), stream))
                    await stream.run(client)

            async with client_of(server.url) as client, asyncio.TaskGroup() as group:
                for number in range(CLIENTS):
                    group.create_task(ask(number))
                await until(lambda: "instance changes its role" in server.output(), "an instance changes its role")
                await until(lambda: "change of role is done" in server.output(), "it serves", 2 * START_S)
                changed.set()
            return asked

        asked = asyncio.run(load())
        assert [stream.error for _, stream in asked] == [None] * len(asked)
        assert all(stream.done and stream.tokens == expected[number] for number, stream in asked)
        assert sorted(roles().values()) == ["decode", "prefill", "prefill"]
        (said,) = [line for line in server.output().splitlines() if "instance changes its role" in line]
        assert "role=prefill" in said
        server.wait_for_freed_memory()


def test_mixed_instances_have_no_role_to_change(tmp_path: Path, cache: Path, checkpoints_dir: Path) -> None:
    options = ["--models", str(checkpoints_dir), "--policy", "serverlessllm", "--change-roles"]
    with launched(tmp_path, cache, *options) as server:
        assert server.process.wait(START_S) == 2
        assert "aegis: --change-roles is for prefill and decode instances: say how many" in server.output()
