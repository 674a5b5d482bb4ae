"""An id is its caller's own: nobody takes another's, waits for it, or learns that it is there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live.server import Server, launched
from tests.live.streams import WAIT_S, Stream, until

KEYS = {"alice": "sk-alice", "bob": "sk-bob", "carol": "sk-carol"}
ID = "the-same/id"
TOKENS = 300
ASKS = 12
"""Each on a connection of its own, so that every proxy is asked."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("ids")
    config = directory / "aegis.yaml"
    keys = {name: {"key": key} for name, key in KEYS.items()}
    config.write_text(json.dumps({"models": {"llama": {"path": str(checkpoints_dir / "llama")}}, "api_keys": keys}))
    options = ["--config", str(config), "--dtype", "float32", "--device-memory", "64MiB", "--proxies", "2"]
    with launched(directory / "server", cache, *options) as running:
        running.wait_for_ready()
        yield running


def client_of(server: Server, caller: str, request: str = ID) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {KEYS[caller]}"} | ({"x-request-id": request} if request else {})
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=server.url, headers=headers, timeout=WAIT_S, limits=limits, trust_env=False)


def body_of(caller: str) -> dict[str, Any]:
    prompt = [5, 6, 7 + list(KEYS).index(caller)]
    return {"model": "llama", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}


async def settled(server: Server, caller: str) -> None:
    """Returns when the end of `caller`'s request is stored, which its client may hear of a moment before."""
    async with client_of(server, caller) as client:
        while (await client.post("/v1/completions", json=body_of(caller))).status_code == httpx.codes.CONFLICT:
            await asyncio.sleep(0.01)


async def replies(server: Server, caller: str, body: dict[str, Any]) -> list[httpx.Response]:
    async with client_of(server, caller) as client:
        return [await client.post("/v1/completions", json=body | {"return_token_ids": True}) for _ in range(ASKS)]


async def tokens_alone(server: Server, caller: str) -> list[int]:
    stream = Stream(body_of(caller))
    async with client_of(server, caller, "") as client:
        await stream.run(client)
    assert stream.done
    return stream.tokens


def test_callers_have_the_same_id_at_once_and_each_retries_its_own(served: Server) -> None:
    async def main() -> None:
        alone = {caller: await tokens_alone(served, caller) for caller in KEYS}
        streams = {caller: Stream(body_of(caller)) for caller in ("alice", "bob")}
        async with client_of(served, "alice") as alice, client_of(served, "bob") as bob, asyncio.TaskGroup() as group:
            for caller, client in (("alice", alice), ("bob", bob)):
                group.create_task(streams[caller].run(client))
            await until(lambda: all(stream.tokens for stream in streams.values()), "both stream")
            busy = await alice.post("/v1/completions", json=body_of("alice"))
            assert not any(stream.ended for stream in streams.values())
        assert busy.status_code == httpx.codes.CONFLICT and busy.json()["error"]["code"] == "request_in_flight"
        assert f"'{ID}'" in busy.json()["error"]["message"]
        assert {caller: stream.tokens for caller, stream in streams.items()} == {c: alone[c] for c in streams}

        for caller in streams:
            await settled(served, caller)
        before = served.metrics().total("store_replayed_total")
        proxies: set[str] = set()
        for caller in streams:
            for reply in await replies(served, caller, body_of(caller)):
                assert reply.status_code == httpx.codes.OK, reply.text
                assert reply.json()["choices"][0]["token_ids"] == alone[caller]
                proxies.add(reply.headers["x-aegis-proxy"])
        assert proxies == {"proxy-0", "proxy-1"}
        assert served.metrics().total("store_replayed_total") == before + 2 * ASKS

        for reply in await replies(served, "bob", body_of("alice")):
            assert (reply.status_code, reply.json()["error"]["code"]) == (422, "request_id_reused")
            assert f"'{ID}'" in reply.json()["error"]["message"]
        generated = served.metrics().total("generation_tokens_total")
        (first, *_) = await replies(served, "carol", body_of("carol"))
        assert first.json()["choices"][0]["token_ids"] == alone["carol"]
        assert served.metrics().total("generation_tokens_total") == generated + TOKENS, "hers is a new request"

    asyncio.run(main())
