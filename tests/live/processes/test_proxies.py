"""Several proxies serve one pool, over TLS: their streams are exact, and any of them answers for the whole."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import msgspec
import pytest

from aegis.telemetry.live_view import Live
from tests.certificates import make_certificate
from tests.live.cases import Case
from tests.live.server import ROOT, SPLIT, Server, eventually, launched
from tests.live.streams import Stream, client_of, until

STREAMS = 32
LATER = "proxy-1"
LONG_TOKENS = 300


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path, tight_memory: str
) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("proxies")
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    make_certificate(certificate, key)
    options = ["--models", str(checkpoints_dir), "--dtype", "float32", "--device-memory", tight_memory]
    options += ["--slo", "ttft=1,tbt=0.1", "--proxies", "2", *SPLIT]
    options += ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    with launched(directory, cache, *options, "--debug-memory") as running:
        running.wait_for_ready()
        assert running.url.startswith("https://")
        yield running


async def proxies_of(streams: Sequence[Stream], client: httpx.AsyncClient) -> None:
    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(_run(stream, client))


async def _run(stream: Stream, client: httpx.AsyncClient) -> None:
    try:
        await stream.run(client)
    except httpx.TransportError as error:
        stream.error = {"message": type(error).__name__}


def spread(streams: Sequence[Stream]) -> Counter[str]:
    return Counter(stream.proxy for stream in streams)


@pytest.mark.long
def test_streams_over_two_proxies_are_what_transformers_generates(served: Server, cases: Sequence[Case]) -> None:
    asked = cases[: STREAMS // 2]
    streams = [Stream(case.body) for case in asked]

    async def main() -> None:
        async with client_of(served.url) as client:
            await proxies_of(streams, client)

    before = served.metrics()
    asyncio.run(main())
    assert [stream.error for stream in streams] == [None] * len(asked)
    assert [stream.tokens for stream in streams] == [case.expected.tokens for case in asked]
    assert set(spread(streams)) == {"proxy-0", LATER}
    after = served.wait_for_freed_memory()
    assert after.total("request_success_total") - before.total("request_success_total") == len(asked)


def test_the_command_line_trusts_the_certificate_that_it_is_told_to(served: Server) -> None:
    command = [sys.executable, "-m", "aegis.cli.main", "models", "list", "--url", served.url]
    trusting = os.environ | {"PYTHONPATH": str(ROOT), "SSL_CERT_FILE": str(served.log.parent / "certificate.pem")}
    listed = subprocess.run(command, env=trusting, check=True, capture_output=True, text=True)
    assert served.get("/v1/models").json()["data"][0]["id"] in listed.stdout
    doubting = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert doubting.returncode == 2 and "SSL_CERT_FILE" in doubting.stderr


def test_any_proxy_answers_for_the_whole(served: Server) -> None:
    def asked(path: str) -> dict[str, httpx.Response]:
        """Each proxy's answer."""
        answers: dict[str, httpx.Response] = {}
        eventually(lambda: answers.update(_by_proxy(served.get(path))) or len(answers) == 2, f"{path} of both")
        return answers

    for path in ("/v1/models", "/debug/memory", "/debug/node", "/health", "/ready"):
        assert {reply.status_code for reply in asked(path).values()} == {200}, path
    served.wait_for_freed_memory()
    for path in ("/v1/models", "/debug/node"):
        first, second = asked(path).values()
        assert first.json() == second.json()

    def same_records() -> bool:
        records = asked("/debug/records")
        return records["proxy-0"].content == records[LATER].content

    eventually(same_records, "what each has to tell has come to the other")
    assert served.post("/models/unload", {"model": "nobody"}).status_code == httpx.codes.NOT_FOUND


def _by_proxy(reply: httpx.Response) -> dict[str, httpx.Response]:
    return {reply.headers["x-aegis-proxy"]: reply}


def test_a_response_of_one_proxy_goes_on_at_another(served: Server) -> None:
    at = dict[str, str]()

    def asked() -> bool:
        reply = _respond(served)
        at[reply.headers["x-aegis-proxy"]] = reply.json()["id"]
        return len(at) == 2

    eventually(asked, "both have answered")
    for first in at.values():
        _goes_on_everywhere(served, first)


def _goes_on_everywhere(served: Server, response_id: str) -> None:
    seen, continued = dict[str, object](), dict[str, object]()

    def all_did() -> bool:
        found, later = served.get(f"/v1/responses/{response_id}"), _respond(served, previous_response_id=response_id)
        assert (found.status_code, later.status_code) == (200, 200), later.text
        seen[found.headers["x-aegis-proxy"]] = found.json()
        continued[later.headers["x-aegis-proxy"]] = later.json()["usage"]["input_tokens"]
        return len(seen) == len(continued) == 2

    eventually(all_did, "both have found it")
    assert len(set(map(str, seen.values()))) == len(set(continued.values())) == 1


def _respond(served: Server, **more: str) -> httpx.Response:
    return served.post("/v1/responses", {"model": "llama", "input": "the cat", "max_output_tokens": 4, **more})


def test_models_come_and_go_at_every_proxy(served: Server, checkpoints_dir: Path) -> None:
    for _ in range(4):  # through whichever proxy
        reply = served.post("/models/load", {"source": str(checkpoints_dir / "llama"), "name": "again"})
        assert reply.status_code == httpx.codes.OK, reply.text
        seen = {_answered(served, "again") for _ in range(12)}
        assert seen == {httpx.codes.OK}
        assert served.post("/models/unload", {"model": "again"}).status_code == httpx.codes.OK
        eventually(
            lambda: {_answered(served, "again") for _ in range(12)} == {httpx.codes.NOT_FOUND}, "gone everywhere"
        )


def _answered(server: Server, model: str) -> int:
    return server.post("/v1/completions", {"model": model, "prompt": [5, 6], "max_tokens": 2}).status_code


@pytest.mark.long
def test_a_signal_ends_all_proxies_and_tells_every_client(
    tmp_path: Path, cache: Path, checkpoints_dir: Path, tight_memory: str
) -> None:
    options = ["--models", str(checkpoints_dir / "llama"), "--dtype", "float32", "--device-memory", tight_memory]
    streams = [
        Stream({"model": "llama", "prompt": [7, 8], "max_tokens": LONG_TOKENS, "ignore_eos": True})
        for _ in range(STREAMS)
    ]

    async def main(server: Server) -> None:
        async with client_of(server.url) as client, asyncio.TaskGroup() as group:
            group.create_task(proxies_of(streams, client))
            await until(lambda: all(len(stream.tokens) > 2 for stream in streams), "all are running")
            assert await asyncio.to_thread(server.stop, signal.SIGTERM) == 0

    with launched(tmp_path / "server", cache, *options, "--proxies", "3", "--shutdown-timeout", "15") as server:
        server.wait_for_ready()
        asyncio.run(main(server))
        assert "Traceback" not in server.output()
    assert len(spread(streams)) == 3
    for stream in streams:
        assert stream.done or (stream.error and stream.error["message"].startswith("the server is shutting down"))


def test_every_proxy_tells_who_watches_of_the_whole_server(served: Server) -> None:
    models = [model["id"] for model in served.get("/v1/models").json()["data"]]  # without those that have gone
    finished = sum(served.metrics().total("request_success_total", model_name=model) for model in models)
    told: dict[str, Live] = {}

    def asked() -> bool:
        reply = served.get("/debug/live")
        told[reply.headers["x-aegis-proxy"]] = msgspec.json.decode(reply.content, type=Live)
        counts = [sum(model.tally.finished for model in live.models) for live in told.values()]
        return counts == [finished] * 2

    eventually(asked, "both tell of all requests")
    (first, second) = told.values()
    assert (first.start, len(first.instances)) == (second.start, 2)
