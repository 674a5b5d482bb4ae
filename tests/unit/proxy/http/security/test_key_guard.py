"""API keys: which callers are let in, what they may use, and what is never shown."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from aegis.core.api_keys import Caller, Key, Keyring, digest_of
from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from aegis.core.limits import Limits
from aegis.telemetry.logs import LineFormatter
from tests.unit.proxy.http.scripted import ScriptedMarket, ScriptedPermit, calling, keyring, market

BODY = {"model": "m", "prompt": "x"}
KEYS = keyring(admin="boss", alice="sk-alice", bob="sk-bob")


def ask(
    path: str, key: str | None = None, *, behind: ScriptedMarket | None = None, method: str = "POST", **settings: Any
) -> httpx.Response:
    settings = {"keys": KEYS} | settings
    headers = {} if key is None else {"authorization": f"Bearer {key}".encode()}
    body = {"json": BODY} if method == "POST" else {}
    reply: httpx.Response = calling(
        behind or market(), lambda client: client.request(method, path, headers=headers, **body), **settings
    )
    return reply


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/embeddings", "/nothing"])
def test_without_a_key_nothing_is_told(path: str) -> None:
    for key in (None, "", "sk-alic", "sk-alice2", "é"):
        reply = ask(path, key)
        assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
        assert reply.json()["error"]["code"] == "invalid_api_key"
        assert reply.headers["x-request-id"]


def test_every_key_s_request_is_its_caller_s() -> None:
    behind = market()
    for key in ("sk-alice", "sk-bob", "boss"):
        assert ask("/v1/completions", key, behind=behind).status_code == 200
    assert [permit.caller for permit in behind.permits] == ["alice", "bob", "admin"]


def test_where_there_are_no_keys_any_will_do() -> None:
    behind = market()
    assert ask("/v1/completions", "none", behind=behind, keys=keyring()).status_code == 200
    assert behind.permits[0].caller == ""


def test_keys_count_as_they_are_when_a_request_comes() -> None:
    behind = market()

    async def asked(client: httpx.AsyncClient) -> list[int]:
        statuses = []
        for behind.keys in (
            keyring(),
            KEYS,
            keyring(admin="boss", bob="sk-bob"),
            keyring(bob="sk-bob", alice="sk-alice"),
        ):
            for path in ("/v1/completions", "/debug/node"):
                sent = {"authorization": "Bearer sk-alice"}
                method, body = ("GET", None) if path.startswith("/debug") else ("POST", BODY)
                statuses.append((await client.request(method, path, headers=sent, json=body)).status_code)
        return statuses

    assert calling(behind, asked) == [200, 200, 200, 403, 401, 401, 200, 200]


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version"])
def test_the_status_needs_no_key_unless_it_is_told_so(path: str) -> None:
    assert ask(path, method="GET").status_code == 200
    assert ask(path, method="GET", status_needs_key=True).status_code == 401
    assert ask(path, "sk-bob", method="GET", status_needs_key=True).status_code == 200


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/app.js"])
def test_a_page_s_files_need_no_key_and_what_is_only_called_alike_does(path: str) -> None:
    assert ask(path, method="GET", status_needs_key=True).status_code == 200
    assert ask(path.replace("dashboard", "dashboards"), method="GET").status_code == 401


@pytest.mark.parametrize("path", ["/debug/node", "/debug/memory", "/debug/spans", "/debug/live"])
def test_commands_need_the_admin_s_key(path: str) -> None:
    assert ask(path, method="GET").status_code == 401
    assert ask(path, "sk-alice", method="GET").status_code == 403
    assert ask(path, "boss", method="GET").status_code == 200
    assert ask(path, method="GET", keys=keyring(alice="sk-alice")).status_code == 200, "this machine's users"


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("localhost:8000", True),
        ("LOCALHOST.", True),
        ("aegis.localhost", True),
        ("127.0.0.1:8000", True),
        ("127.8.9.1", True),
        ("192.168.1.7:8000", True),
        ("[::1]:8000", True),
        ("models.lan:8000", True),
        ("evil.com:8000", False),
        ("localhost.evil.com", False),
        ("127.0.0.1.evil.com", False),
        ("localhost@evil.com", False),
        ("evil.com@[", False),
        ("[::1", False),
    ],
)
def test_a_page_whose_name_leads_to_this_machine_commands_nothing(host: str, own: bool) -> None:
    """To a browser that page and this server are of one origin."""
    sent = {"host": host, "sec-fetch-site": "same-origin"}
    for method, path, keys, allowed in (
        ("GET", "/debug/node", keyring(), own),
        ("GET", "/debug/live", keyring(alice="sk-alice"), own),
        ("POST", "/models/unload", keyring(), own),
        ("GET", "/debug/node", keyring(admin="boss"), True),
        ("GET", "/v1/models", keyring(), True),
    ):
        headers = sent | ({"authorization": "Bearer boss"} if keys.admin else {})
        reply: httpx.Response = calling(
            market(),
            lambda client, method=method, path=path, headers=headers: client.request(
                method, path, headers=headers, json={"model": "m"} if method == "POST" else None
            ),
            keys=keys,
            host="models.lan",
        )
        assert (reply.status_code != 403) == allowed, (path, reply.text)
        if not allowed:
            assert "localhost" in reply.json()["error"]["message"]


def test_refusals_are_counted_by_what_they_are_for() -> None:
    behind = market()
    ask("/v1/completions", behind=behind)
    ask("/debug/node", "sk-alice", behind=behind, method="GET")
    for reason in ("key_limit", None):
        refusal = UserError("too many", status=429, code="rate_limit_exceeded", reason=reason)
        behind.permit_refusals.append(refusal)
        ask("/v1/completions", "sk-alice", behind=behind)
    ask("/v1/completions", "sk-alice", behind=behind)
    ask("/v1/models/none", "sk-alice", behind=behind, method="GET")
    assert behind.refused == ["invalid_api_key", "forbidden", "key_limit", "rate_limit_exceeded"]


def test_a_key_stands_in_no_log_line_but_its_name_does(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for key in ("sk-alice", "sk-wrong"):
            ask("/v1/completions", key)
    lines = [LineFormatter().format(record) for record in caplog.records]
    assert any("caller=alice" in line for line in lines)
    assert not any("sk-" in line for line in lines)


def test_a_limit_is_429_with_the_time_to_wait_and_uses_nothing() -> None:
    behind = market()
    behind.permit_refusals.append(UserError("too many", status=429, code="rate_limit_exceeded", retry_after_s=17))
    reply = ask("/v1/completions", "sk-alice", behind=behind)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "17")
    assert reply.json()["error"]["code"] == "rate_limit_exceeded"
    assert behind.submitted == []


def test_a_permit_is_given_back_with_what_was_generated() -> None:
    behind = market()
    body = BODY | {"add_special_tokens": False}
    for more in ({}, {"stream": True}, {"n": 2}):
        calling(behind, lambda client, more=more: client.post("/v1/completions", json=body | more))
    assert [(permit.prompt_tokens, permit.answer_tokens) for permit in behind.permits] == [(1, 5), (1, 5), (1, 10)]


def test_a_permit_of_a_request_that_is_refused_later_is_given_back() -> None:
    behind = market()
    behind.refusals.append(UserError("draining", status=503))
    assert ask("/v1/completions", "sk-bob", behind=behind).status_code == 503
    assert [permit.answer_tokens for permit in behind.permits] == [0]


LIMITED = Keyring((Key(digest_of("sk-carol"), Caller("carol", Limits(requests_per_minute=5))),))
LARGE = {"authorization": "Bearer sk-carol", "content-type": "application/json"}


@pytest.mark.parametrize("told", [True, False], ids=["of a length", "in chunks"])
def test_a_limited_caller_has_its_permit_before_a_large_body_is_read(told: bool) -> None:
    behind, sent = market(), 0
    behind.permit_refusals.append(UserError("too many", status=429, code="rate_limit_exceeded"))

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(64):
            yield b" " * (16 << 10)
            sent += 16 << 10

    headers = LARGE | ({"content-length": f"{1 << 20}"} if told else {})
    reply: httpx.Response = calling(
        behind, lambda client: client.post("/tokenize", headers=headers, content=body()), keys=LIMITED
    )
    assert reply.status_code == 429 and behind.permits == []
    assert sent == 0 if told else sent <= 80 << 10


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_large_body_counts_once_for_its_caller_and_once_for_its_model(path: str) -> None:
    behind = market()
    content = json.dumps(BODY).encode().ljust(100_000)
    reply: httpx.Response = calling(
        behind, lambda client: client.post(path, headers=LARGE, content=content), keys=LIMITED
    )
    assert reply.status_code == 200, reply.text
    assert [(permit.caller, permit.model) for permit in behind.permits] == [("carol", None), ("", "m")]
    assert len({(permit.prompt_tokens, permit.answer_tokens) for permit in behind.permits}) == 1
    assert behind.permits[0].answer_tokens is not None


def test_a_large_body_that_is_wrong_counts_and_its_permit_is_given_back() -> None:
    behind = market()
    wrong: httpx.Response = calling(
        behind, lambda client: client.post("/v1/completions", headers=LARGE, content=b"[" * 100_000), keys=LIMITED
    )
    assert wrong.status_code == 400
    assert [(permit.caller, permit.answer_tokens) for permit in behind.permits] == [("carol", 0)]


def test_a_large_body_that_its_model_has_no_room_for_gives_its_caller_s_permit_back() -> None:
    behind = market()
    permit = behind.permit

    async def refused(caller: Caller | None, model: ModelId | None) -> ScriptedPermit:
        if model is not None:
            behind.permit_refusals.append(UserError("too many", status=429, code="rate_limit_exceeded"))
        return await permit(caller, model)

    behind.permit = refused  # type: ignore[method-assign]
    content = json.dumps(BODY).encode().ljust(100_000)
    reply: httpx.Response = calling(
        behind, lambda client: client.post("/v1/completions", headers=LARGE, content=content), keys=LIMITED
    )
    assert reply.status_code == 429
    assert [(permit.caller, permit.answer_tokens) for permit in behind.permits] == [("carol", 0)]


def test_web_pages_of_elsewhere_may_ask_where_the_server_is_told_so() -> None:
    asks = "authorization, content-type, x-stainless-lang, x-stainless-retry-count"  # as OpenAI's client in a browser
    page = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    page["access-control-request-headers"] = asks

    def preflight(**settings: Any) -> httpx.Response:
        reply: httpx.Response = calling(
            market(), lambda client: client.options("/v1/completions", headers=page), keys=KEYS, **settings
        )
        return reply

    assert "access-control-allow-origin" not in preflight().headers
    allowed = preflight(cors_origins=("https://chat.example",))
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://chat.example")
    assert "access-control-allow-origin" not in preflight(cors_origins=("https://other.example",)).headers


def test_prompts_are_logged_where_the_server_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        calling(market(), lambda client: client.post("/v1/completions", json=BODY | {"prompt": "once upon"}))
        assert not any("once" in LineFormatter().format(record) for record in caplog.records)
        calling(
            market(),
            lambda client: client.post("/v1/completions", json=BODY | {"prompt": "once upon"}),
            logs_prompts=True,
        )
    (line,) = [line for record in caplog.records if "once" in (line := LineFormatter().format(record))]
    assert 'text="once upon"' in line and "request_id=" in line
