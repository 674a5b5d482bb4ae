"""A mixed instance says what a prefill and a decode instance say, token for token, whoever plans its turns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.market import MARKET, Reference
from tests.live.server import Server, launched
from tests.live.streams import Stream, run_all
from tests.live.test_exactness import Case, clear_case


@pytest.fixture(params=["least-slack", "aegaeon", "serverlessllm", "prefill-first"])
def mixed(
    request: pytest.FixtureRequest, tmp_path: Path, cache: Path, checkpoints_dir: Path, tight_memory: str
) -> Iterator[Server]:
    """In memory for two models of eight."""
    options = ["--models", str(checkpoints_dir), "--dtype", "float32", "--device-memory", tight_memory]
    kind = ["--mixed", "1", "--policy", request.param]
    with launched(tmp_path, cache, *options, *kind, "--debug-memory") as running:
        running.wait_for_ready()
        yield running


@pytest.fixture(scope="module")
def cases(references: dict[str, Reference]) -> list[Case]:
    return [clear_case(model, number, references[model]) for number in range(3) for model in MARKET]


@pytest.fixture(scope="module")
def expected(server: Server, cases: list[Case]) -> list[Stream]:
    return run_all(server.url, [case.body for case in cases])


def test_a_mixed_instance_says_what_a_split_pool_says(expected: list[Stream], cases: list[Case], mixed: Server) -> None:
    streams = run_all(mixed.url, [case.body for case in cases])
    after = mixed.wait_for_freed_memory()
    assert [stream.tokens for stream in streams] == [stream.tokens for stream in expected]
    assert all(stream.done for stream in streams)
    assert set(after.instances()) == {"mixed-0"}
    assert after.total("instance_prefills_total", instance="mixed-0") == len(cases)
