"""Seeing and moving memory while streams run: what is told adds up, and a command answers when it is done."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest

from tests.live.market import Reference
from tests.live.roomy import DEVICE_MIB, FLOOR_MIB
from tests.live.server import ROOT, WAIT_S, Server
from tests.live.streams import Body, Stream, client_of, run_all

MIB = 1 << 20
LEAST_MIB = 6
"""The weights of the market's largest model and a slab, each in pages of 2 MiB."""


@pytest.fixture(autouse=True)
def _unlimited_afterwards(roomy: Server) -> Iterator[None]:
    yield
    roomy.wait_for_freed_memory()
    assert moved(roomy, "limit", limit=f"{DEVICE_MIB}MiB").status_code == httpx.codes.OK


def moved(server: Server, how: str, **body: Any) -> httpx.Response:
    return server.post(f"/debug/memory/{how}", {"instance": "decode-0"} | body)


def decode(report: dict[str, Any]) -> dict[str, Any]:
    (device,) = report["devices"]
    (found,) = [use for use in device["instances"] if use["instance"] == "decode-0"]
    return dict(found)


def greedy(model: str, reference: Reference, *, prompt_tokens: int, max_tokens: int) -> tuple[Body, list[int]]:
    """A request, and what transformers answers, clearly."""
    of = ("memory", model, prompt_tokens)
    prompt, answer = reference.clear_case(*of, length=prompt_tokens, max_tokens=max_tokens, ignore_eos=True)
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return body, answer.tokens


async def seen(client: httpx.AsyncClient, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    """The first report of which that is true."""
    for _ in range(round(WAIT_S / 0.02)):
        report: dict[str, Any] = (await client.get("/debug/memory")).json()
        if condition(report):
            return report
    raise AssertionError(f"never seen: {what}")


@pytest.mark.long
def test_what_is_told_while_streams_run_adds_up(roomy: Server, references: dict[str, Reference]) -> None:
    body, tokens = greedy("gemma2", references["gemma2"], prompt_tokens=300, max_tokens=150)
    reports = []

    async def look(_: Sequence[Stream]) -> None:
        async with client_of(roomy.url) as client:
            reports.append(await seen(client, lambda r: bool(r["devices"][0]["slabs"]["shapes"]), "slabs"))

    (stream,) = run_all(roomy.url, [body], look)
    assert stream.tokens == tokens
    (report,) = reports
    (device,) = report["devices"]
    assert device["capacity_bytes"] == DEVICE_MIB * MIB
    held = sum(use["held_bytes"] for use in device["instances"])
    assert device["free_bytes"] + device["wiping_bytes"] + held == device["capacity_bytes"]
    assert [use["instance"] for use in device["instances"]] == ["decode-0", "prefill-0"]
    (shape,) = device["slabs"]["shapes"]
    assert shape["models"] == ["gemma2"] and 0 <= shape["fragmentation"] < 1
    assert device["slabs"]["held_bytes"] == shape["slabs"] * 2 * MIB
    host = report["host_kv"]
    assert sum(host[f"{of}_bytes"] for of in ("leased", "free", "orphaned", "kept")) == host["capacity_bytes"]
    assert {image["model"] for image in report["model_cache"]["images"]} == set(references)


def test_a_limit_is_lowered_while_streams_run_and_no_token_is_another(
    roomy: Server, references: dict[str, Reference]
) -> None:
    cases = [
        greedy(model, references[model], prompt_tokens=length, max_tokens=400)
        for model in ("gemma2", "granite", "llama")
        for length in (100, 200)
    ]
    limit = (LEAST_MIB + 2) * MIB
    answers: list[tuple[dict[str, Any], httpx.Response, dict[str, Any], bool]] = []

    async def lower(streams: Sequence[Stream]) -> None:
        async with client_of(roomy.url) as client:
            before = await seen(client, lambda r: decode(r)["held_bytes"] > limit, "more held than the limit will be")
            body = {"instance": "decode-0", "limit": "8MiB", "timeout_s": 30}
            answer = await client.post("/debug/memory/limit", json=body)
            after = (await client.get("/debug/memory")).json()
            answers.append((before, answer, after, any(not stream.ended for stream in streams)))

    streams = run_all(roomy.url, [body for body, _ in cases], lower)
    ((before, answer, after, was_serving),) = answers
    assert answer.status_code == httpx.codes.OK and was_serving
    assert answer.json()["given_back_bytes"] >= decode(before)["held_bytes"] - limit
    assert decode(after)["held_bytes"] <= decode(after)["limit_bytes"] == limit
    assert [stream.tokens for stream in streams] == [tokens for _, tokens in cases]
    assert decode(roomy.get("/debug/memory").json())["held_bytes"] <= limit


@pytest.mark.long
def test_what_cannot_be_given_in_time_is_a_conflict_and_changes_nothing(
    roomy: Server, references: dict[str, Reference]
) -> None:
    body, tokens = greedy("gemma2", references["gemma2"], prompt_tokens=350, max_tokens=600)
    answers: list[tuple[dict[str, Any], httpx.Response, dict[str, Any]]] = []

    async def lower(_: Sequence[Stream]) -> None:
        async with client_of(roomy.url) as client:
            before = await seen(client, lambda r: decode(r)["kv_bytes"] >= 6 * MIB, "three slabs in use")
            body = {"instance": "decode-0", "limit": f"{LEAST_MIB}MiB", "timeout_s": 1e-6}
            answer = await client.post("/debug/memory/limit", json=body)
            answers.append((before, answer, (await client.get("/debug/memory")).json()))

    streams = run_all(roomy.url, [body] * 4, lower)
    ((before, answer, after),) = answers
    assert answer.status_code == httpx.codes.CONFLICT
    assert "within 1e-06 s" in answer.json()["error"]["message"]
    assert decode(after)["limit_bytes"] is None
    assert decode(after)["held_bytes"] >= decode(before)["held_bytes"]
    assert [stream.tokens for stream in streams] == [tokens] * 4


def test_a_request_that_a_limit_makes_impossible_fails_with_the_reason(roomy: Server) -> None:
    assert moved(roomy, "limit", limit=f"{LEAST_MIB}MiB").status_code == httpx.codes.OK
    short: Body = {"model": "gemma2", "prompt": [1] * 20, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    fits, does_not = run_all(roomy.url, [short, short | {"prompt": [1] * 400, "max_tokens": 400}])
    assert fits.done and len(fits.tokens) == 20
    assert does_not.error is not None and "memory limit" in does_not.error["message"]


def test_an_idle_instance_is_trimmed_to_the_floor(roomy: Server) -> None:
    run_all(roomy.url, [{"model": "llama", "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}])
    roomy.wait_for_freed_memory()
    held = decode(roomy.get("/debug/memory").json())["held_bytes"]
    assert held > FLOOR_MIB * MIB
    answer = moved(roomy, "trim")
    assert answer.json() == {"instance": "decode-0", "given_back_bytes": held - FLOOR_MIB * MIB}
    assert decode(roomy.get("/debug/memory").json())["held_bytes"] == FLOOR_MIB * MIB


@pytest.mark.parametrize(
    ("how", "body", "status", "param"),
    [
        ("limit", {"limit": f"{LEAST_MIB * MIB - 1}"}, 400, "limit"),
        ("limit", {"limit": "lots"}, 400, "limit"),
        ("limit", {"instance": "decode-9", "limit": "32MiB"}, 404, "instance"),
        ("trim", {"instance": "decode-9"}, 404, "instance"),
    ],
)
def test_a_wrong_command_is_refused(roomy: Server, how: str, body: dict[str, str], status: int, param: str) -> None:
    answer = moved(roomy, how, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert decode(roomy.get("/debug/memory").json())["limit_bytes"] is None


def test_strangers_neither_see_nor_move_memory(roomy: Server) -> None:
    elsewhere = {"x-forwarded-for": "192.0.2.7"}
    url = f"{roomy.url}/debug/memory"
    assert (
        httpx.get(url, headers=elsewhere, timeout=WAIT_S, trust_env=False, verify=False).status_code
        == httpx.codes.FORBIDDEN
    )
    for how in ("limit", "trim"):
        body = {"instance": "decode-0"}
        answer = httpx.post(f"{url}/{how}", json=body, headers=elsewhere, timeout=WAIT_S, trust_env=False, verify=False)
        assert answer.status_code == httpx.codes.FORBIDDEN


def test_the_command_line_tells_and_moves_the_same(roomy: Server) -> None:
    def aegis(*arguments: str) -> str:
        command = [sys.executable, "-m", "aegis.cli.main", "memory", *arguments, "--url", roomy.url]
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout

    assert aegis("limit", "decode-0", "32MiB").startswith("decode-0 may hold 32MiB; it gave back ")
    (row,) = [line.split() for line in aegis().splitlines() if line.startswith("decode-0") and "idle" in line]
    assert row[:2] == ["decode-0", "idle"] and row[3] == "32"
    assert aegis("trim", "decode-0").startswith("decode-0 gave back ")
