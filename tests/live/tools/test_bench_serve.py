"""`aegis bench serve` as users run it: against this server, and against one that misbehaves."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.live.market import MARKET
from tests.live.server import ROOT, Server
from tests.long_forms import first_of, first_rows_of
from tests.openai_stand import Stand

COMMAND_S = 120
KEY = "sk-very-secret"


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aegis.cli.main", "bench", *options]
    environment = {"PYTHONPATH": str(ROOT), "OPENAI_API_KEY": KEY}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=COMMAND_S)
    assert KEY not in done.stdout + done.stderr
    return done


def measured(directory: Path, url: str, *options: str) -> dict[str, Any]:
    """The written result of a run; where no request of it succeeded, scripts can tell."""
    file = directory / "result.json"
    done = bench("serve", "--base-url", url, "--json", str(file), *options)
    assert done.stdout.startswith("============ Serving Benchmark Result ============\n")
    result: dict[str, Any] = json.loads(file.read_text())
    assert (done.returncode, done.stderr) == (0 if result["completed"] else 1, "")
    assert all(f" {reason}\n" in done.stdout for reason in result["failures"])
    return result


# --- this server ----------------------------------------------------------------------------------------------------


def test_a_workload_of_many_models_is_answered_whole(server: Server, tmp_path: Path) -> None:
    workload = "poisson:models=8,rps=2,duration=2,lengths=uniform,input=4-40,output=2-12"
    records = tmp_path / "records.jsonl"
    result = measured(tmp_path, server.url, "--workload", workload, "--records", str(records))
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert set(result["per_model"]) <= set(MARKET) and len(result["per_model"]) > 4
    assert (result["completed"], result["failed"]) == (len(rows), 0)
    assert result["total_output_tokens"] == sum(row["output_tokens"] for row in rows) == result["slo_tokens"]
    assert result["total_input_tokens"] == sum(row["input_tokens"] for row in rows)
    assert all(len(row["token_times_ns"]) == row["output_tokens"] for row in rows)


@pytest.mark.parametrize(
    "options", first_of(1, [["--prompt-as", "text"], ["--endpoint", "/v1/chat/completions", "--max-concurrency", "2"]])
)
def test_text_and_chat_are_answered_too(server: Server, tmp_path: Path, options: list[str]) -> None:
    lengths = ["--random-input-len", "12", "--random-output-len", "6", "--ignore-eos"]
    result = measured(tmp_path, server.url, "--num-prompts", "8", *lengths, *options)
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (8, 0, 48)


@pytest.mark.long
def test_what_a_server_refuses_is_counted_by_reason(server: Server, tmp_path: Path) -> None:
    options = ["--model", "llama", "--num-prompts", "3", "--random-input-len", "4", "--random-output-len", "100000"]
    result = measured(tmp_path, server.url, *options)
    ((reason, count),) = result["failures"].items()
    assert (count, reason.startswith("HTTP 400: the prompt has 4 tokens and 100000 are to be generated")) == (3, True)
    assert (result["completed"], result["slo_attainment"], result["slo_tokens"]) == (0, 0, 300_000)


# --- a server that misbehaves ---------------------------------------------------------------------------------------


@pytest.fixture
def stand() -> Iterator[Stand]:
    """It runs in a thread with a loop of its own."""
    stand, loop = Stand(), asyncio.new_event_loop()
    running = stand.running()
    thread = Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(running.__aenter__(), loop).result(COMMAND_S)
    yield stand
    asyncio.run_coroutine_threadsafe(running.__aexit__(None, None, None), loop).result(COMMAND_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.long
def test_each_way_to_fail_is_a_line_and_none_spoils_the_run(stand: Stand, tmp_path: Path) -> None:
    bad = ("refused", "rude", "cut", "unfinished", "mute", "garbage", "html")
    models = [option for name in ("good", "no-usage", "bundled", *bad) for option in ("--model", name)]
    lengths = ["--random-input-len", "3", "--random-output-len", "4"]
    result = measured(tmp_path, stand.url, *models, *lengths, "--num-prompts", "20", "--timeout", "5")
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (6, 14, 24)
    assert (result["slo_tokens_met"], result["slo_tokens"]) == (24, 80)
    assert result["failures"] == dict.fromkeys(
        [
            "HTTP 401: I know you: Bearer ***",
            "HTTP 500: out of memory",
            "an event is not as the API has it",
            "no answer in time",
            "the answer is text/html, no event stream",
            "the connection broke in the answer",
            "the stream ended before the answer did",
        ],
        2,
    )
    assert {name: figures["failed"] for name, figures in result["per_model"].items() if figures["failed"]} == (
        dict.fromkeys(bad, 2)
    )
    assert all(type(token) is int for body in stand.bodies for token in body["prompt"])


@pytest.mark.long
def test_runs_are_compared(stand: Stand, tmp_path: Path) -> None:
    options = ["--model", "good", "--random-input-len", "3", "--random-output-len", "4", "--num-prompts"]
    for name, count in (("a", "4"), ("b", "4"), ("c", "5")):
        (tmp_path / name).mkdir()
        measured(tmp_path / name, stand.url, *options, count)
    a, b, c = (str(tmp_path / name / "result.json") for name in "abc")
    done = bench("compare", a, b, "--per-model")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("mean_ttft_ms") == 2
    refused = bench("compare", a, c)
    assert refused.returncode == 2
    assert refused.stderr.startswith("aegis: ") and "cannot be compared" in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    first_rows_of(
        1,
        [
            (["--base-url", "http://127.0.0.1:1"], "no server at http://127.0.0.1:1"),
            (["--slo", "ttft"], "--slo: 'ttft' is no limit from a microsecond to a day"),
            (["--trace", "none.csv"], "none.csv"),
            (["--request-rate", "x"], "--request-rate"),
        ],
    ),
)
def test_what_cannot_run_says_so_in_one_line(options: list[str], reason: str) -> None:
    done = bench("serve", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1
