"""A mixed instance says what transformers generates, token for token, whoever plans its turns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.cases import Case
from tests.live.server import Server, launched
from tests.live.streams import run_all

STREAMS = 24
_LONG = [pytest.param(policy, marks=pytest.mark.long) for policy in ("serverlessllm", "aegaeon", "prefill-first")]


@pytest.fixture(params=["least-slack", *_LONG])
def mixed(
    request: pytest.FixtureRequest, tmp_path: Path, cache: Path, checkpoints_dir: Path, tight_memory: str
) -> Iterator[Server]:
    """In memory for two models of eight."""
    options = ["--models", str(checkpoints_dir), "--dtype", "float32", "--device-memory", tight_memory]
    kind = ["--mixed", "1", "--policy", request.param]
    with launched(tmp_path, cache, *options, *kind, "--debug-memory") as running:
        running.wait_for_ready()
        yield running


def test_a_mixed_instance_says_what_transformers_generates(cases: list[Case], mixed: Server) -> None:
    asked = cases[:STREAMS]
    streams = run_all(mixed.url, [case.body for case in asked])
    after = mixed.wait_for_freed_memory()
    assert [stream.tokens for stream in streams] == [case.expected.tokens for case in asked]
    assert all(stream.done for stream in streams)
    assert set(after.instances()) == {"mixed-0"}
    assert after.total("instance_prefills_total", instance="mixed-0") == STREAMS
