"""An instance with two lanes says what transformers generates, token for token: streams run beside the prompts of
others. Its lanes are two cores, or share the time of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from aegis.telemetry.spans import Span
from tests.live.cases import Case
from tests.live.server import Server, launched
from tests.live.streams import run_all

pytestmark = pytest.mark.long

ASKED = slice(8, 24)
"""Of the cases: the longest prompts, which take long enough that streams run beside them, and short answers."""

ROUNDS = 5
ROOMY = "96MiB"  # for several of the models at once


@pytest.fixture(
    params=[
        ("muxwise", 2),
        pytest.param(("muxwise", 1), marks=pytest.mark.long),
        pytest.param(("least-slack", 2), marks=pytest.mark.long),
        pytest.param(("least-slack", 1), marks=pytest.mark.long),
    ],
    ids=[
        "muxwise on cores",
        "muxwise on the time of cores",
        "least-slack on cores",
        "least-slack on the time of cores",
    ],
)
def divided(request: pytest.FixtureRequest, tmp_path: Path, cache: Path, checkpoints_dir: Path) -> Iterator[Server]:
    policy, threads = request.param
    options = ["--models", str(checkpoints_dir), "--dtype", "float32", "--device-memory", ROOMY, "--debug-memory"]
    # the time of cores brings nothing for a prompt that least slack would not cut: none takes 10 ms here
    gap_s = 0.01 if policy == "least-slack" and threads == 1 else 0.5
    kind = ["--mixed", "1", "--policy", policy, "--slo", f"ttft=10,tbt=0.1,gap={gap_s}"]
    with launched(tmp_path, cache, *options, *kind, environment={"OMP_NUM_THREADS": str(threads)}) as running:
        running.wait_for_ready()
        yield running


def test_streams_beside_prompts_say_what_transformers_generates(cases: list[Case], divided: Server) -> None:
    """Asked again where no prompt came while others streamed: on a busy machine all prompts may come first."""
    asked = cases[ASKED]
    for _ in range(ROUNDS):
        streams = run_all(divided.url, [case.body for case in asked])
        after = divided.wait_for_freed_memory()
        assert [stream.tokens for stream in streams] == [case.expected.tokens for case in asked]
        assert all(stream.done for stream in streams)
        assert after.total("instance_lanes", instance="mixed-0") == 2
        if ran_beside(msgspec.json.Decoder(Span).decode_lines(divided.get("/debug/spans").content)):
            break
    else:
        pytest.fail("both lanes never ran at one time")


def ran_beside(spans: list[Span]) -> bool:
    """Whether two lanes that divide the device ran at one time."""
    second = [span for span in spans if span.lane]
    assert second, "the device was divided"
    return any(
        not b.lane and a.share + b.share == 1000 and a.start_ns < b.stop_ns and b.start_ns < a.stop_ns
        for a in second
        for b in spans
    )


def test_where_lanes_that_were_asked_for_cannot_be_had_one_line_says_so(
    tmp_path: Path, cache: Path, checkpoints_dir: Path
) -> None:
    options = ["--models", str(checkpoints_dir / "llama"), "--mixed", "1", "--lanes", "2", "--policy", "serverlessllm"]
    with launched(tmp_path, cache, *options) as running:
        running.wait_for_ready()
        body = {"model": "llama", "prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0}
        assert run_all(running.url, [body])[0].done
        assert running.metrics().total("instance_lanes", instance="mixed-0") == 1
    lines = [line for line in running.output().splitlines() if "no lanes" in line]
    assert len(lines) == 1
    assert "'serverlessllm' runs one step at a time" in lines[0]
