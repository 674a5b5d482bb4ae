"""Bodies that no client should send: each is its sender's error, and named."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from aegis.core.errors import UserError
from proxy.http.openai import chat
from proxy.http.request import body
from tests.unit.proxy.http.scripted import byte_text, calling, market, post, says

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/models/update")


def sent(path: str, content: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
    reply = post(market(), path, content=content, headers={"content-type": "application/json"} | headers)
    return reply.status_code, reply.json()["error"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b" ",
        b"{",
        b"[]",
        b"nul",
        b'{"model": "m"}}',
        b'{"model": "m",}',
        b"{'model': 'm'}",
        b'{"model": NaN}',
        b'{"model": Infinity}',
        b'{"model": "\\ud800"}',
        b'{"model": "\\udc00\\ud800"}',
        b'{"model": "\xff"}',
        b'{"model": "\x00"}',
        '{"model": "m"}'.encode("utf-16"),
        b"\xef\xbb\xbf{",
        b'{"model": "m", "model": "m"}',
        b'{"model": "m", "max_tokens": 1e999}',
        b'{"model": "m", "max_tokens": ' + b"9" * 100_000 + b"}",
        b'{"model": "m", "stop": ' + b"[" * 100_000,
        b"model=m",
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_what_is_no_json_is_told_so(path: str, content: bytes) -> None:
    status, error = sent(path, content)
    assert status == 400, error
    assert "\n" not in error["message"] and len(error["message"]) < 300


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (b'{"model": "m", "prompt": "x", "logit_bias": {"5": 1, "5": -100}}', "5"),
        (b'{"model": "m", "prompt": "x", "logit_bias": {"5": 1, "\\u0035": -100}}', "5"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "x", "role": "system"}]}', "role"),
        (b'{"model": "m", "prompt": "x", "a": [[{"b": [{"c": 1, "d": 2, "c": 1}]}]]}', "c"),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_a_name_twice_in_one_object_is_refused_at_any_depth(path: str, content: bytes, name: str) -> None:
    status, error = sent(path, content)
    assert (status, error["param"]) == (400, name) and "more than once" in error["message"]


@pytest.mark.parametrize("key", ["05", "+5", "5.0", " 5", "５", "-0"])
def test_a_token_id_is_written_in_one_way(key: str) -> None:
    reply = post(market(), "/v1/completions", json={"model": "m", "prompt": "x", "logit_bias": {"5": 1, key: 1}})
    assert reply.status_code == 400 and "no token id" in reply.json()["error"]["message"]


def test_each_content_encoding_counts() -> None:
    headers = [("content-encoding", "identity"), ("content-encoding", "gzip")]
    reply = post(market(), "/v1/completions", content=b"\x1f\x8b", headers=headers)
    assert (reply.status_code, reply.json()["error"]["param"]) == (415, "Content-Encoding")


def test_a_refusal_names_what_may_be_sent_once() -> None:
    reply = post(market(), "/v1/completions", json={"model": "m", "prompt": "x", "best_of": 7})
    assert reply.json()["error"]["message"].endswith("leave it out or send 1")


NUMBERS = [b"-1e308", b"1e308", b"9" * 4000, b"-" + b"9" * 400, b"1e-400", b"0.1e1", b"-0", b"18446744073709551616"]
PARAMETERS = ["max_tokens", "n", "temperature", "top_p", "top_k", "seed", "logprobs", "priority", "min_p", "stop"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_odd_numbers_are_taken_or_refused_by_name(name: str) -> None:
    for number in NUMBERS:
        content = b'{"model": "m", "prompt": "x", "' + name.encode() + b'": ' + number + b"}"
        reply = post(market(), "/v1/completions", content=content)
        assert reply.status_code == 200 or reply.json()["error"]["param"] == name, (name, number, reply.text)


@pytest.mark.parametrize("name", ["model", "prompt", "stop", "logit_bias", "response_format", "user", "unknown"])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_whatever_the_depth_it_is_the_client_s_error(name: str, opening: str) -> None:
    """At some depths reading works and what comes after does not."""
    closing = {"[": "]", '{"a":': "}"}[opening]

    async def all_depths(client: httpx.AsyncClient) -> set[int]:
        statuses = set()
        for depth in [*range(1, 64, 7), *range(300, 1100, 23)]:
            content = f'{{"model": "m", "prompt": "x", "{name}": {opening * depth}1{closing * depth}}}'
            statuses.add((await client.post("/v1/completions", content=content)).status_code)
        return statuses

    assert calling(market(), all_depths) == {400}


def test_a_schema_or_variables_of_any_depth_harm_nobody() -> None:
    async def all_depths(client: httpx.AsyncClient) -> set[int]:
        statuses = set()
        for depth in range(100, 1000, 53):
            nested = '{"items": ' * depth + "{}" + "}" * depth
            for more in (
                f'"response_format": {{"type": "json_schema", "json_schema": {{"name": "s", "schema": {nested}}}}}',
                f'"chat_template_kwargs": {{"mood": {nested}}}',
            ):
                content = f'{{"model": "m", "messages": [{{"role": "user", "content": "x"}}], {more}}}'
                statuses.add((await client.post("/v1/chat/completions", content=content)).status_code)
        return statuses

    assert calling(market(), all_depths) <= {200, 400}


@pytest.mark.parametrize(
    "template",
    ["{% for m in messages %}", "{{ messages.nothing.at.all }}", "{{ 1 / 0 }}", "{{ raise_exception('no') }}"],
)
def test_a_malformed_template_is_told_and_is_no_bug(template: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    reply = post(market(text=byte_text(template)), "/v1/chat/completions", body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")


def test_a_prompt_beyond_the_limit_is_refused_without_its_length_too() -> None:
    async def chunked() -> Any:
        for _ in range(100):
            yield b"x" * 65536
            await asyncio.sleep(0)

    reply = calling(market(), lambda client: client.post("/v1/completions", content=chunked()))
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")


DENSE = {
    "a schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"x": 1}}}},
    "a tool": {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": 1}}}]},
    "variables": {"chat_template_kwargs": {"x": 1}},
}


@pytest.mark.parametrize("name", DENSE)
def test_a_body_of_many_parts_keeps_nobody_else_waiting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is parsed and read beside the loop."""
    threads: set[int] = set()

    def watched(of: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            threads.add(threading.get_ident())
            return of(*arguments, **named)

        return call

    for module, function in ((body, "parse_object"), (chat, "read_parameters"), (chat, "read_tools")):
        monkeypatch.setattr(module, function, watched(getattr(module, function)))
    inner = '"x": {' + ", ".join(f'"p{i}": {{"type": "string"}}' for i in range(10_000)) + "}"
    content = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], **DENSE[name]})
    content = content.replace('"x": 1', inner)
    reply = post(market(says("x")), "/v1/chat/completions", content=content)
    assert reply.status_code in (200, 400)
    assert threads and threading.get_ident() not in threads


def test_parameters_are_so_many_at_most() -> None:
    status, error = sent("/v1/completions", json.dumps({f"p{i}": 1 for i in range(257)}).encode())
    assert (status, error["code"]) == (400, "invalid_json") and "256 parameters" in error["message"]


PARTS = body.PARTS_MAX - 3  # beside the body itself and the two names


@pytest.mark.parametrize(
    ("inner", "fits"),
    [
        ("[" + ",".join(["[]"] * (PARTS - 1)) + "]", True),
        ("[" + ",".join(["[]"] * PARTS) + "]", False),
        ("[" + ",".join(["{}"] * PARTS) + "]", False),
        ("[" + ",".join(['""'] * (PARTS - 1)) + "]", True),
        ("[" + ",".join(['""'] * PARTS) + "]", False),
        ("[" * (2 * PARTS), False),
        (json.dumps("[{" * PARTS), True),
        (json.dumps('"' * 4 * PARTS), True),
        (json.dumps("\\" * 4 * PARTS), True),
        ("[" + ",".join([json.dumps('["')] * (PARTS - 1)) + "]", True),
        ("[" + ",".join([json.dumps('\\"')] * PARTS) + "]", False),
    ],
)
def test_a_body_has_so_many_parts_at_most_and_what_stands_in_a_text_is_none(inner: str, fits: bool) -> None:
    content = '{"a": 5, "b": %s}' % inner  # noqa: UP031 - braces
    if fits:
        assert body.parse_object(content.encode()) == json.loads(content)
        return
    with pytest.raises(UserError, match=f"more than {body.PARTS_MAX} strings, lists and objects") as error:
        body.parse_object(content.encode())
    assert error.value.code == "too_many_parts"
