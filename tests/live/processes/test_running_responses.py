"""A response that one proxy generates is seen and cancelled through any other, with Redis and without."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import checkpoints
from tests.live.server import Server, eventually, launched
from tests.long_forms import first_of

MODEL = "endless"
CONTEXT_TOKENS = 1 << 17
CANCELLED_S = 1.0


@pytest.fixture(scope="module", params=first_of(1, ["embedded", "off"]))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Server]:
    """Its model has no end token, and a context that takes it long to fill."""
    directory = tmp_path_factory.mktemp("responses")
    endless: dict[str, Any] = {"eos_token_id": None, "max_position_embeddings": CONTEXT_TOKENS}
    checkpoints.write(directory / MODEL, "llama", tokenizer=True, **endless)
    redis = ["--redis", "off"] if request.param == "off" else []
    options = ["--models", str(directory / MODEL), "--dtype", "float32", "--proxies", "2", *redis]
    with launched(directory, cache, *options, "--device-memory", "256MiB", "--debug-memory") as running:
        running.wait_for_ready()
        yield running


def _asked(server: Server) -> tuple[str, dict[str, Any]]:
    """The proxy that generates the response, and the response as it begins."""
    reply = server.post("/v1/responses", {"model": MODEL, "input": "the cat", "background": True})
    assert reply.status_code == httpx.codes.OK, reply.text
    return reply.headers["x-aegis-proxy"], reply.json()


def _runs(server: Server) -> bool:
    return server.metrics().total("num_requests_running") == 1


def _generated(server: Server) -> int:
    return server.metrics().total("generation_tokens_total")


def _both(server: Server, response_id: str) -> list[Any]:
    """The response as each proxy tells it."""
    seen = dict[str, Any]()

    def asked() -> bool:
        found = server.get(f"/v1/responses/{response_id}")
        seen[found.headers["x-aegis-proxy"]] = found.json()
        return len(seen) == 2

    eventually(asked, "both have told")
    return list(seen.values())


def test_a_response_in_the_background_is_in_progress_at_every_proxy(served: Server) -> None:
    _, begun = _asked(served)
    eventually(lambda: _runs(served), "it runs")
    assert _both(served, begun["id"]) == [begun] * 2 and begun["status"] == "in_progress"
    assert served.post(f"/v1/responses/{begun['id']}/cancel", {}).json()["status"] == "cancelled"
    served.wait_for_freed_memory()


def test_a_response_in_the_background_is_cancelled_through_another_proxy(served: Server) -> None:
    through = set[bool]()
    while through != {True, False}:
        before = _generated(served)
        at, begun = _asked(served)
        eventually(partial(lambda before: _generated(served) > before + 20, before), "it has told something")
        began_s = time.monotonic()
        reply = served.post(f"/v1/responses/{begun['id']}/cancel", {})
        took_s = time.monotonic() - began_s
        assert (reply.status_code, reply.json()["status"]) == (httpx.codes.OK, "cancelled"), reply.text
        assert reply.json()["output"] and reply.json()["usage"]["output_tokens"] > 0
        assert took_s < CANCELLED_S
        served.wait_for_freed_memory()
        assert _both(served, begun["id"]) == [reply.json()] * 2
        again = served.post(f"/v1/responses/{begun['id']}/cancel", {})
        assert (again.status_code, again.json()) == (httpx.codes.OK, reply.json())
        through.add(reply.headers["x-aegis-proxy"] == at)
