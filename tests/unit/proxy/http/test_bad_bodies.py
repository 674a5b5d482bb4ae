"""Bodies that no client should send: each is its sender's error, and named."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import pytest

from aegis.core.errors import UserError
from proxy.http.errors import shown
from proxy.http.json_bounds import EXPONENTS_MAX, FRACTIONS_MAX, PARTS_MAX, VALUES_MAX
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


HALF = "a string has half of a surrogate pair (\\ud800 to \\udfff) without the other half"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body is empty: send a JSON object"),
        (b" \r\n", "the body is empty: send a JSON object"),
        (b'{"model": "m"', "the body is not valid JSON: it ends too early"),
        (b'{"model": "\\ud800', "the body is not valid JSON: it ends too early"),
        (b'{"model": "\\\\ud800"', "the body is not valid JSON: it ends too early"),
        (b'{"model": "\\ud800"}', f"the body is not valid JSON: {HALF}"),
        (b'{"model": "\\udc00"}', f"the body is not valid JSON: {HALF}"),
        (b'{"model": "\\ud800 and so on"}', f"the body is not valid JSON: {HALF}"),
        (b'{"model": "\xff"}', "the body is not valid JSON: it is not UTF-8"),
        (b'{"model": "m",}', "the body is not valid JSON: trailing comma in object (byte 14)"),
    ],
)
def test_what_is_wrong_with_json_is_said_plainly(content: bytes, message: str) -> None:
    assert sent("/v1/completions", content)[1]["message"] == message


def test_what_is_wrong_with_a_schema_as_text_is_said_plainly() -> None:
    body = {"model": "m", "prompt": "x", "structured_outputs": {"json": "{"}}
    message = post(market(), "/v1/completions", body).json()["error"]["message"]
    assert message == "'structured_outputs.json' is no JSON: it ends too early"


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


PARTS = PARTS_MAX - 3  # beside the body itself and the two names


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
    with pytest.raises(UserError, match=f"more than {PARTS_MAX} strings, lists and objects") as error:
        body.parse_object(content.encode())
    assert error.value.code == "too_many_parts"


SLOW = [
    b"1e300",
    b"1.7976931348623157e308",
    b"2.2250738585072011e-308",
    b"9" * 700 + b"e-1000",
    b"3e-300",
    b"5",
    b"0.5",
]


@pytest.mark.parametrize("number", SLOW, ids=[each[:30].decode() for each in SLOW])
def test_numbers_take_no_time_that_others_notice(number: bytes) -> None:
    """Some take the decoder 40 microseconds each, and 4 MiB of them minutes."""
    content = b'{"model": "m", "a": {}, "prompt": [%s]}' % b",".join([number] * ((4 << 20) // (len(number) + 1) - 20))
    began_s = time.monotonic()
    with pytest.raises(UserError, match="the body has more than") as error:
        body.parse_object(content)
    assert error.value.code == "too_many_parts" and time.monotonic() - began_s < 0.25


@pytest.mark.parametrize(
    ("unit", "count"), [("1e5", EXPONENTS_MAX), ("0.5", FRACTIONS_MAX), ("5", VALUES_MAX - 2)], ids=str
)
def test_so_many_numbers_may_be_had(unit: str, count: int) -> None:
    text = json.dumps("1e5, 0.5 " * 10_000)
    for more, fits in ((0, True), (1, False)):
        content = f'{{"a": {text}, "b": [{",".join([unit] * (count + more))}]}}'.encode()
        if fits:
            assert body.parse_object(content) == json.loads(content)
        else:
            with pytest.raises(UserError, match="the body has more than"):
                body.parse_object(content)


@pytest.mark.parametrize(
    "content",
    [
        '{"a": {"b": 1}, "c": {"b": 2, "d": [{"b": 3}, {"b": 4}]}, "b": 5}',
        '{"a": {"b": "{\\"b\\": 1, \\"b\\": 2}", "c": "b", "d": "b"}}',
        '{"a": {"\\"": 1, "\\\\": 2, "\\\\\\"": {}, "": "}"}}',
    ],
)
def test_names_that_differ_or_stand_in_other_objects_may_be_had(content: str) -> None:
    assert body.parse_object(content.encode()) == json.loads(content)


def calls(arguments: list[str]) -> dict[str, Any]:
    called = [{"id": "c", "function": {"name": "f", "arguments": each}} for each in arguments]
    return {"model": "m", "messages": [{"role": "assistant", "tool_calls": called}, {"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (['{"a": 1, "a": 2}'], "more than once"),
        (['{"a": {"b": 1, "\\u0062": 2}}'], "more than once"),
        (['{"a": [' + ",".join(["[]"] * 40_000) + "]}"] * 2, "too_many_parts"),
        (['{"a": [' + ",".join(["1e300"] * 400) + "]}"], "too_many_parts"),
    ],
    ids=["a name twice", "in two ways", "many parts", "slow numbers"],
)
def test_arguments_of_calls_are_read_like_a_body(arguments: list[str], told: str) -> None:
    reply = post(market(text=byte_text("{{ messages }}")), "/v1/chat/completions", calls(arguments))
    assert reply.status_code == 400 and told in reply.text, reply.text[:300]


@pytest.mark.parametrize(
    "schema", ['{"type": "null", "type": "string"}', "[" * 70_000, '{"enum": [' + "1e300," * 400 + "1]}", " " * 140_000]
)
def test_a_schema_in_a_string_is_read_like_a_body(schema: str) -> None:
    began_s = time.monotonic()
    reply = post(market(), "/v1/completions", {"model": "m", "prompt": "x", "structured_outputs": {"json": schema}})
    assert reply.status_code == 400 and time.monotonic() - began_s < 1, reply.text[:300]


def test_what_is_shown_of_a_value_is_what_python_shows_of_it_but_for_the_words_of_json() -> None:
    assert [shown(value) for value in (None, True, False)] == ["null", "true", "false"]
    assert shown({"a": [None, True]}) == "{'a': [null, true]}"
    values: list[Any] = [
        5,
        5.5,
        "x",
        "it's",
        "é\n",
        [],
        {},
        [1, [2, {"a": "b"}]],
        {"a": [1], "b": {"c": {}}},
    ]
    for value in values:
        assert shown(value) == repr(value)
    many = [[["x" * 50] * 3] * 3] * 3
    assert shown(many) == repr(many)[:60] + "…"
    deep: Any = 1
    for _ in range(900):
        deep = {"a": [deep]}
    assert shown(deep) == ('{"a": [' * 20).replace('"', "'")[:60] + "…"
    assert shown("x" * 100) == "'" + "x" * 59 + "…"
    assert shown({"a" * 100: 5}) == "{'" + "a" * 58 + "…"
