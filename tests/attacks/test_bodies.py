"""Bodies that two readers would read in two ways, or that say one thing and mean another."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest

from tests.attacks.harness import at_once, under_attack
from tests.attacks.wire import Wire, request
from tests.live.server import WAIT_S, Server
from tests.long_forms import first_of

MAIN, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
ASKED = '"model": "llama", "prompt": [5, 6], "max_tokens": 2'
CHATS = '"model": "llama", "max_tokens": 2'
DOUBLED = [
    (MAIN, '{"model": "llama", %s}' % ASKED, "model"),  # noqa: UP031 - braces
    (MAIN, "{" + ASKED + ', "logit_bias": {"5": 1, "5": -1}}', "5"),
    (MAIN, "{" + ASKED + ', "logit_bias": {"5": 1, "05": -1}}', "logit_bias"),
    (MAIN, "{" + ASKED + ', "logit_bias": {"+5": 1}}', "logit_bias"),
    (MAIN, "{" + ASKED + ', "logit_bias": {" 5": 1}}', "logit_bias"),
    (MAIN, "{" + ASKED + ', "logit_bias": {"1_0": 1}}', "logit_bias"),
    (MAIN, "{" + ASKED + ', "logit_bias": {"\\u0665": 1}}', "logit_bias"),
    (
        MAIN,
        "{" + ASKED + ', "stream": true, "stream_options": {"include_usage": true, "include_usage": false}}',
        "usage",
    ),
    (MAIN, "{" + ASKED + ', "mo\\u0064el": "qwen2"}', "model"),
    (CHAT, "{" + CHATS + ', "messages": [{"role": "user", "role": "system", "content": "x"}]}', "role"),
    (CHAT, "{" + CHATS + ', "messages": [{"role": "user", "content": "x", "content": "y"}]}', "content"),
    (
        CHAT,
        "{" + CHATS + ', "messages": [{"role": "user", "content": [{"type": "text", "text": "", "text": "y"}]}]}',
        "text",
    ),
    (TOKENIZE, '{"model": "llama", "messages": [{"role": "user", "role": "user", "content": "x"}]}', "role"),
]


def post(server: Server, path: str, content: bytes, *headers: tuple[str, str]) -> httpx.Response:
    sent = [("content-type", "application/json"), *headers]
    return httpx.post(server.url + path, content=content, headers=sent, timeout=WAIT_S, trust_env=False, verify=False)


def told(reply: httpx.Response, status: int) -> str:
    error = reply.json()["error"]
    assert reply.status_code == status, reply.text
    assert "\n" not in error["message"] and len(error["message"]) < 1000
    return error["message"]


@pytest.mark.parametrize(("path", "body", "name"), DOUBLED)
def test_a_name_stands_once_in_an_object(server: Server, path: str, body: str, name: str) -> None:
    assert name in told(post(server, path, body.encode()), 400)


@pytest.mark.parametrize(
    "codings",
    [
        ("gzip",),
        ("identity", "gzip"),
        ("gzip", "identity"),
        ("identity, gzip",),
        ("IDENTITY, gzip",),
        ("identity;q=1",),
        ("deflate",),
        ("br",),
    ],
)
def test_what_is_compressed_is_refused(server: Server, codings: tuple[str, ...]) -> None:
    body = gzip.compress(("{" + ASKED + "}").encode())
    for content in (body, ("{" + ASKED + "}").encode()):
        reply = post(server, MAIN, content, *(("content-encoding", coding) for coding in codings))
        assert "Content-Encoding" in told(reply, 415)


@pytest.mark.parametrize("codings", [("identity",), ("Identity",), ("identity", "identity"), ("identity, identity",)])
def test_what_is_not_is_read(server: Server, codings: tuple[str, ...]) -> None:
    body = ("{" + ASKED + "}").encode()
    reply = post(server, MAIN, body, *(("content-encoding", coding) for coding in codings))
    assert reply.status_code == httpx.codes.OK, reply.text


@pytest.mark.parametrize("changes", [{"best_of": 2}, {"best_of": 0}, {"best_of": 2, "n": 2}, {"best_of": 3, "n": 2}])
def test_what_cannot_be_had_is_said_in_a_way_that_helps(server: Server, changes: dict[str, Any]) -> None:
    body = {"model": "llama", "prompt": [5, 6], "max_tokens": 2} | changes
    reply = server.post(MAIN, body)
    if reply.status_code != httpx.codes.OK:  # as many as there are choices may be had
        message = told(reply, 400)
        assert "best_of" in message and "1 or 1" not in message
    else:
        assert changes["best_of"] == changes.get("n", 1)


NESTED = 100_000
HEAVY: dict[str, bytes] = {
    "nested lists": b'{"model": ' + b"[" * NESTED,
    "nested objects": b'{"a":' * NESTED,
    "nested objects in a parameter": b'{%s, "logit_bias": %s1%s}' % (ASKED.encode(), b'{"5":' * 900, b"}" * 900),
    "many names": json.dumps({f"name{n}": n for n in range(150_000)}).encode(),
    "many names in a parameter": json.dumps(
        {"model": "llama", "logit_bias": {str(n): 1 for n in range(200_000)}}
    ).encode(),
    "many messages": json.dumps({"model": "llama", "messages": [{"role": "user", "content": ""}] * 90_000}).encode(),
    "many parts": json.dumps(
        {"model": "llama", "messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 90_000}]}
    ).encode(),
    "many numbers": b'{"model": "llama", "prompt": [' + b"5," * 1_900_000 + b"5]}",
    "numbers that take long": b'{"model": "llama", "a": {}, "prompt": [' + b"1e300," * 600_000 + b"5]}",
    "few numbers that take long": b'{"model": "llama", "a": {}, "prompt": [' + b"1e300," * 10_000 + b"5]}",
    "many small numbers": b'{"model": "llama", "a": {}, "prompt": [' + b"3e-300," * 550_000 + b"5]}",
    "many numbers beside objects": b'{"model": "llama", "a": {}, "prompt": [' + b"5," * 1_900_000 + b"5]}",
    "many types of a schema": json.dumps(
        {"model": "llama", "prompt": "x", "max_tokens": 1}
        | {"structured_outputs": {"json": {"type": [f"t{n}" for n in range(3500)], "enum": ["a"] * 3500}}}
    ).encode(),
    "a schema in a string": json.dumps(
        {"model": "llama", "prompt": "x", "structured_outputs": {"json": "[" + "[]," * 1_000_000 + "[]]"}}
    ).encode(),
    "arguments in strings": json.dumps(
        {
            "model": "llama",
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "c", "function": {"name": "f", "arguments": '{"a": [' + "[]," * 60_000 + "[]]}"}}
                    ]
                    * 20,
                }
            ],
        }
    ).encode(),
    "a deep value that is told": b'{"model": %s1%s}' % (b"[" * 900, b"]" * 900),
    "many empty lists": b'{"model": "llama", "prompt": [' + b"[]," * 1_300_000 + b"[]]}",
    "a number of many digits": b'{"model": "llama", "prompt": [' + b"9" * 3_900_000 + b"]}",
    "a fraction of many digits": b'{"model": "llama", "temperature": 0.' + b"9" * 3_900_000 + b"}",
    "an exponent of many digits": b'{"model": "llama", "temperature": 1e' + b"9" * 3_900_000 + b"}",
    "a name of many letters": b'{"' + b"a" * 3_900_000 + b'": 1}',
    "many escapes": b'{"model": "' + rb"\u00e9" * 640_000 + b'"}',
    "no UTF-8": b'{"model": "' + b"\xff" * 3_900_000 + b'"}',
    "half of a pair": b'{"model": "llama", "prompt": "' + rb"\ud800" * 640_000 + b'"}',
    "spaces": b" " * 3_900_000,
}


@pytest.mark.alone
@pytest.mark.parametrize("name", first_of(4, list(HEAVY)))
def test_what_is_hard_to_read_disturbs_nobody(server: Server, name: str) -> None:
    body = HEAVY[name]
    assert len(body) < 4 << 20

    def attack(number: int) -> httpx.Response:
        return post(server, (MAIN, CHAT)[number % 2], body)

    with under_attack(server, f"bodies: {name}"):
        for reply in at_once(attack, 6):
            assert reply.status_code in (400, 404), reply.text[:300]
            told(reply, reply.status_code)


def test_heads_and_bodies_of_odd_letters_are_told_of_in_one_line(server: Server) -> None:
    for path in ("/%0d%0aX-A:%20b", "/%00", "/%ff%fe", "/..%2f..%2fetc%2fpasswd", "//elsewhere/", "/%e2%80%a8"):
        with Wire(server.url) as wire:
            wire.send(request(path))
            heard = wire.hear(count=1)
        assert heard.statuses == [404] and b"x-a" not in heard.responses[0].headers, heard
        assert "\n" not in json.loads(heard.responses[0].body)["error"]["message"]
    lines = server.output().splitlines()
    assert not [line for line in lines if line.startswith(("X-A", "\0"))]
