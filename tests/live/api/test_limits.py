"""Keys and limits of a server with two proxies: exact, whichever of them is asked, and nothing secret in its log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections import Counter
from typing import Any

import httpx
import openai
import pytest

from tests.live.api.keys import ALICE, ALLOWED, BOB, CAROL, TOKENS
from tests.live.server import Server, eventually
from tests.live.streams import WAIT_S

PROXIES = ("proxy-0", "proxy-1")
BODY: dict[str, Any] = {"model": "llama", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
ENDLESS: dict[str, Any] = {"ignore_eos": True}
LONG = {"model": "long", "max_tokens": 3000, "stream": True}
LASTING = LONG | {"max_tokens": 16_000}
"""Nobody waits for its end."""


def client_of(server: Server, key: str) -> httpx.AsyncClient:
    """Every request of it has a connection of its own, and so a proxy by chance."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(
        base_url=server.url, headers=headers, timeout=WAIT_S, limits=limits, trust_env=False, verify=False
    )


def asked(server: Server, key: str, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    async def main() -> list[httpx.Response]:
        async with client_of(server, key) as client:
            return await asyncio.gather(*(client.post("/v1/completions", json=body | ENDLESS) for body in bodies))

    return asyncio.run(main())


def statuses(replies: list[httpx.Response]) -> Counter[int]:
    return Counter(reply.status_code for reply in replies)


def test_who_has_no_key_is_told_so_and_the_official_client_has_one(keyed: Server) -> None:
    assert keyed.get("/v1/models").status_code == 401
    assert keyed.get("/health").status_code == 200
    assert '-H "Authorization: Bearer $AEGIS_API_KEY"' in keyed.output()
    client = openai.OpenAI(base_url=keyed.url + "/v1", api_key=BOB, max_retries=0)
    assert client.completions.create(**BODY, extra_body=ENDLESS).usage.completion_tokens == 4  # type: ignore[union-attr]
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-wrong").completions.create(**BODY, extra_body=ENDLESS)
    with pytest.raises(openai.PermissionDeniedError):
        client.post("/../models/unload", body={"model": "llama"}, cast_to=object)


def test_requests_per_minute_are_the_server_s_not_each_proxy_s(keyed: Server) -> None:
    replies = asked(keyed, ALICE, [BODY] * (2 * ALLOWED))
    counted = statuses(replies)
    assert {reply.headers["x-aegis-proxy"] for reply in replies} == set(PROXIES)
    assert counted.keys() == {200, 429}
    assert ALLOWED <= counted[200] <= ALLOWED + 2, "and what came back meanwhile"
    for reply in replies:
        if reply.status_code == 429:
            assert 1 <= int(reply.headers["retry-after"]) <= 60 // ALLOWED * ALLOWED
            assert "key 'alice'" in reply.json()["error"]["message"]
    client = openai.OpenAI(base_url=keyed.url + "/v1", api_key=ALICE, max_retries=0)
    with pytest.raises(openai.RateLimitError):
        for _ in range(ALLOWED):  # one may come back every few seconds
            client.completions.create(**BODY, extra_body=ENDLESS)


def test_no_more_run_at_once_than_may_and_those_that_leave_make_room(keyed: Server) -> None:
    long = BODY | ENDLESS | LASTING

    async def main() -> list[int]:
        seen: list[int] = []
        async with client_of(keyed, BOB) as client:
            while len(seen) < 8:
                async with (
                    client.stream("POST", "/v1/completions", json=long) as first,
                    client.stream("POST", "/v1/completions", json=long) as second,
                ):
                    let_in = [first.status_code, second.status_code] == [200, 200]
                    assert let_in or seen, "the first two find nobody"
                    if let_in:  # or those before are leaving still
                        seen += [(await client.post("/v1/completions", json=BODY)).status_code for _ in range(4)]
        return seen

    assert asyncio.run(asyncio.wait_for(main(), WAIT_S)) == [429] * 8


def test_tokens_are_those_of_prompts_and_answers(keyed: Server) -> None:
    (first,) = asked(keyed, CAROL, [BODY | {"prompt": [5] * 200, "max_tokens": TOKENS}])
    assert first.json()["usage"]["total_tokens"] == 200 + TOKENS
    (refused,) = asked(keyed, CAROL, [BODY])
    assert refused.status_code == 429 and "tokens per minute" in refused.json()["error"]["message"]


def test_what_was_refused_is_counted_by_reason_over_all_proxies(keyed: Server) -> None:
    counted = keyed.metrics()
    before = counted.total("requests_refused_total", reason="invalid_api_key")
    assert keyed.get("/v1/models").status_code == 401
    assert keyed.metrics().total("requests_refused_total", reason="invalid_api_key") == before + 1
    assert counted.total("requests_refused_total", reason="key_limit") > 0


@pytest.mark.long
def test_keys_of_an_edited_file_count_at_every_proxy_and_what_runs_goes_on(keyed: Server) -> None:
    file = keyed.log.parents[1] / "aegis.yaml"
    written = json.loads(file.read_text())
    dave = "sk-dave-s3cret"
    (file.parent / "dave").write_text(dave)
    long = BODY | ENDLESS | LONG

    def edit(**more: dict[str, Any]) -> None:
        file.write_text(json.dumps(written | {"api_keys": written["api_keys"] | more}))

    async def answers(client: httpx.AsyncClient, status: int) -> None:
        """Until both proxies answer so, and neither otherwise."""
        seen: set[tuple[str, int]] = set()
        while seen != {(proxy, status) for proxy in PROXIES}:
            replies = [await client.post("/v1/completions", json=BODY) for _ in range(8)]
            seen = {(reply.headers["x-aegis-proxy"], reply.status_code) for reply in replies}

    async def whoever_has(key: str, status: int) -> None:
        async with asyncio.timeout(WAIT_S), client_of(keyed, key) as client:
            await answers(client, status)

    async def main() -> list[str]:
        async with asyncio.timeout(WAIT_S), client_of(keyed, dave) as client:
            await answers(client, 401)
            edit(dave={"file": "dave", "limits": {"concurrent": 1}})
            await answers(client, 200)
            async with client.stream("POST", "/v1/completions", json=long) as running:
                assert running.status_code == 200
                await answers(client, 429)
                edit(dave={"file": "dave", "limits": {"concurrent": 2}})
                await answers(client, 200)
                (file.parent / "dave").write_text(dave + "-2")
                await answers(client, 401)
                return [line async for line in running.aiter_lines() if line]

    assert asyncio.run(main())[-1] == "data: [DONE]"
    assert statuses(asked(keyed, dave + "-2", [BODY])) == {200: 1}
    edit()
    eventually(lambda: statuses(asked(keyed, dave + "-2", [BODY])) == {401: 1}, "the key is gone")
    file.write_text(json.dumps({**written, "api_keys": {}}))
    eventually(lambda: "no API key is left" in keyed.output(), "the last keys are gone")
    asyncio.run(whoever_has(BOB, 401))
    assert keyed.get("/v1/models").status_code == 401, "nor is who has none let in"
    edit()
    asyncio.run(whoever_has(BOB, 200))


def test_the_log_is_json_and_holds_no_key(keyed: Server) -> None:
    lines = [line for line in keyed.output().splitlines() if line.startswith("{")]
    requests = [line for line in map(json.loads, lines) if line["event"] == "request"]
    assert {"alice", "bob", "carol"} <= {line.get("caller") for line in requests}
    assert all(line["request_id"] and isinstance(line["status"], int) for line in requests)
    assert "s3cret" not in keyed.output()


def test_at_its_end_what_runs_ends_well_and_what_comes_is_told(keyed: Server) -> None:
    """The last test: it ends the server."""
    long = BODY | ENDLESS | LONG | {"max_tokens": 1500}

    async def main() -> tuple[str, int]:
        async with (
            asyncio.timeout(WAIT_S),
            client_of(keyed, BOB) as client,
            client.stream("POST", "/v1/completions", json=long) as running,
        ):
            lines = running.aiter_lines()
            await anext(lines)
            keyed.process.send_signal(signal.SIGTERM)
            late = 200
            while late != 503:  # the signal is on its way, or a proxy that had nothing to do has just gone
                with contextlib.suppress(httpx.TransportError):
                    late = (await client.post("/v1/completions", json=BODY)).status_code
            return [line async for line in lines if line][-1], late

    last, late = asyncio.run(main())
    assert (last, late) == ("data: [DONE]", 503)
    assert eventually(lambda: keyed.process.poll() is not None, "it has ended") and keyed.process.returncode == 0
