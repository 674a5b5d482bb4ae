"""Bad input: named, explained, and never a 500."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.long_forms import first_of
from tests.unit.proxy.http.scripted import calling, market, post, spec

BOTH = {
    "/v1/completions": {"model": "m", "prompt": "hi"},
    "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
}

WRONG: list[tuple[str, Any]] = [
    ("frequency_penalty", 2.1),
    ("ignore_eos", "yes"),
    ("logit_bias", [1]),
    ("logit_bias", {"258": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"x": 1}),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 1.0),
    ("max_tokens", True),
    ("max_tokens", "5"),
    ("max_tokens", 1 << 70),
    ("min_p", 1.5),
    ("min_tokens", -1),
    ("n", 0),
    ("n", 129),
    ("presence_penalty", -2.5),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-38),
    ("request_id", "a b"),
    ("request_id", "x" * 200),
    ("seed", 1 << 64),
    ("seed", "1"),
    ("stop", ""),
    ("stop", 5),
    ("stop", ["a", None]),
    ("stop", ["a"] * 17),
    ("stop", "x" * 300),
    ("stop_token_ids", [258]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", 4),
    ("stream", 1),
    ("stream", "true"),
    ("stream_options", {"include_usage": True}),
    ("temperature", 1e-310),
    ("priority", 9),
    ("priority", -9),
    ("priority", 1.5),
    ("priority", "high"),
    ("temperature", 2.5),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_p", -0.1),
    ("top_p", 1.01),
    ("user", 5),
    # not supported
    ("guided_json", {"type": "object"}),
    ("use_beam_search", True),
]
WRONG_COMPLETIONS: list[tuple[str, Any]] = [
    ("best_of", 2),
    ("echo", 1),
    ("logprobs", 21),
    ("logprobs", -1),
    ("logprobs", True),
    ("model", 5),
    ("model", None),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [""]),
    ("prompt", [[]]),
    ("prompt", None),
    ("prompt", 5),
    ("prompt", {"a": 1}),
    ("prompt", ["a", 1]),
    ("prompt", [1, "a"]),
    ("prompt", [[1], "a"]),
    ("prompt", [258]),
    ("prompt", [-1]),
    ("prompt", [True]),
    ("prompt", [1.5]),
    ("prompt", [[1, None]]),
    ("suffix", "x"),
]
WRONG_CHAT: list[tuple[str, Any]] = [
    ("chat_template", "{{ messages }}"),
    ("chat_template_kwargs", 5),
    ("chat_template_kwargs", {"messages": []}),
    ("continue_final_message", True),
    ("logprobs", 1),
    ("max_completion_tokens", 0),
    ("messages", []),
    ("messages", None),
    ("messages", "hi"),
    ("tool_choice", "required"),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("top_logprobs", 2),
]


def refused(path: str, changes: dict[str, Any]) -> dict[str, Any]:
    reply = post(market(), path, BOTH[path] | changes)
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda x: str(x)[:30])
@pytest.mark.parametrize("path", BOTH)
def test_a_wrong_value_is_refused_by_name(path: str, name: str, value: Any) -> None:
    error = refused(path, {name: value})
    assert error["param"] == name
    assert name in error["message"]


@pytest.mark.parametrize("path", BOTH)
def test_a_text_that_says_nothing_may_be_empty(path: str) -> None:
    assert post(market(), path, BOTH[path] | {"user": ""}).status_code == 200


def test_stop_strings_are_said_to_be_one_or_a_list() -> None:
    problem = "'stop' must be a string, or a list of up to 16, of 1 to 256 characters each"
    for stop in (5, ["a", None], {"a": 1}):
        assert refused("/v1/completions", {"stop": stop})["message"].startswith(problem)


def test_a_null_is_no_bias() -> None:
    error = refused("/v1/completions", {"logit_bias": {"5": None}})
    assert (error["param"], error["message"]) == ("logit_bias.5", "'logit_bias.5' must be a number, not null")


@pytest.mark.parametrize(("name", "value"), WRONG_COMPLETIONS, ids=lambda x: str(x)[:30])
def test_a_wrong_completion_parameter_is_refused_by_name(name: str, value: Any) -> None:
    assert refused("/v1/completions", {name: value})["param"] == name


@pytest.mark.parametrize(("name", "value"), WRONG_CHAT, ids=lambda x: str(x)[:30])
def test_a_wrong_chat_parameter_is_refused_by_name(name: str, value: Any) -> None:
    assert refused("/v1/chat/completions", {name: value})["param"] == name


def test_an_unknown_parameter_is_named_with_its_nearest() -> None:
    error = refused("/v1/completions", {"temprature": 1})
    assert error["param"] == "temprature"
    assert "'temperature'" in error["message"]
    assert error["code"] == "unknown_parameter"
    assert refused("/v1/completions", {"stream": True, "stream_options": {"include_use": True}})["param"] == (
        "stream_options.include_use"
    )


@pytest.mark.parametrize(
    ("path", "name", "message"),
    [
        (
            "/v1/chat/completions",
            "prompt",
            "unknown parameter 'prompt'; send 'messages' here, or 'prompt' to /v1/completions",
        ),
        (
            "/v1/completions",
            "messages",
            "unknown parameter 'messages'; send 'prompt' here, or 'messages' to /v1/chat/completions",
        ),
        ("/v1/chat/completions", "best_of", "unknown parameter 'best_of'"),
        ("/v1/chat/completions", "max_token", "unknown parameter 'max_token'; did you mean 'max_tokens'?"),
    ],
)
def test_what_another_route_takes_or_nothing_is_like_is_not_taken_for_a_slip(
    path: str, name: str, message: str
) -> None:
    error = refused(path, {name: "x"})
    assert (error["message"], error["param"], error["code"]) == (message, name, "unknown_parameter")


@pytest.mark.parametrize("path", BOTH)
def test_null_is_as_good_as_nothing(path: str) -> None:
    names = {name for name, _ in WRONG} | {"logprobs", "suffix" if path == "/v1/completions" else "tools"}
    assert post(market(), path, BOTH[path] | dict.fromkeys(names)).status_code == 200


def test_too_many_sequences_are_refused() -> None:
    assert refused("/v1/completions", {"prompt": ["a"] * 100, "n": 100})["param"] == "n"
    assert refused("/v1/completions", {"prompt": ["a"] * 1025})["param"] == "prompt"


def test_a_text_whose_tokens_the_model_does_not_know_is_refused() -> None:
    for path, param in (("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
        behind = market()
        behind.served["m"].spec = spec("m", vocab_size=100)
        reply = post(behind, path, BOTH[path])
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
        assert "beyond the model's vocabulary of 100" in reply.json()["error"]["message"]
        assert behind.submitted == []


def test_logprobs_of_a_long_prompt_are_refused_where_they_would_fill_the_memory() -> None:
    behind = market()
    behind.served["m"].spec = spec("m", vocab_size=1 << 25)
    body = {"model": "m", "prompt": list(range(9)), "echo": True}
    assert post(behind, "/v1/completions", body).status_code == 200
    error = post(behind, "/v1/completions", body | {"logprobs": 0}).json()["error"]
    assert error["param"] == "echo"
    assert "up to 8 of this model's" in error["message"]
    assert post(behind, "/v1/completions", body | {"logprobs": 0, "prompt": [1] * 8}).status_code == 200


def test_an_unknown_model_is_404_with_near_matches() -> None:
    behind = market()
    behind.served["qwen3-tiny"] = behind.served["m"]
    reply = post(behind, "/v1/completions", {"model": "Qwen-tiny", "prompt": "x"})
    assert reply.status_code == 404
    error = reply.json()["error"]
    assert error["param"] == "model"
    assert error["code"] == "model_not_found"
    assert "'qwen3-tiny'" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b'"x"',
        b'{"model": "m", "prompt": "\xff"}',
        b'{"model": "m", "prompt": "\\ud800"}',
        b'{"\\udc00": 1}',
        b'{"model": "m", "prompt": "x", "temperature": NaN}',
        b'{"model": "m", "prompt": "x", "temperature": Infinity}',
        b'{"model": "m", "prompt": "x", "temperature": 1e999}',
        b'{"model": "m", "prompt": "x", "max_tokens": 1' + b"0" * 5000 + b"}",
        b'{"model": "m", "prompt": "x", "model": "m"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": "m", "prompt": "x"} {}',
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda body: repr(body[:40]),
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    reply = post(market(), "/v1/completions", content=body)
    assert reply.status_code == 400
    assert "\n" not in reply.json()["error"]["message"]


@pytest.mark.parametrize("number", [b"1e999", b"1" + b"0" * 5000])
def test_a_number_that_is_too_large_is_named(number: bytes) -> None:
    reply = post(market(), "/v1/completions", content=b'{"model": "m", "max_tokens": ' + number + b', "n": 1}')
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "max_tokens")


def test_a_compressed_body_is_told_so() -> None:
    reply = post(market(), "/v1/completions", content=b"\x1f\x8b", headers={"content-encoding": "gzip"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (415, "Content-Encoding")


def test_a_parameter_given_twice_is_named() -> None:
    reply = post(market(), "/v1/completions", content=b'{"model": "m", "prompt": "x", "n": 1, "n": 2}')
    assert reply.json()["error"]["param"] == "n"


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_beyond_the_limit_is_413(declared: bool) -> None:
    async def parts() -> Any:
        for _ in range(4):
            yield b"x" * 40

    content = b"x" * 160 if declared else parts()
    request = {"content": content}
    reply = calling(market(), lambda client: client.post("/v1/completions", **request), body_bytes_max=100)
    assert reply.status_code == 413
    assert "100" in reply.json()["error"]["message"]


def test_messages_stay_short_whatever_was_sent() -> None:
    for name, value in (("temperature", "x" * 10_000), ("stop", [["y"] * 10_000]), ("z" * 10_000, 1)):
        assert len(refused("/v1/completions", {name: value})["message"]) < 500


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = sorted(
    {name for name, _ in WRONG + WRONG_COMPLETIONS + WRONG_CHAT} | {"add_special_tokens", "return_token_ids"}
)
NEAR = st.sampled_from([value for _, value in WRONG + WRONG_COMPLETIONS + WRONG_CHAT])


@settings(max_examples=250)
@given(st.sampled_from(sorted(BOTH)), st.dictionaries(st.sampled_from(NAMES), JSON | NEAR, max_size=4))
def test_no_value_of_any_parameter_breaks_the_server(path: str, changes: dict[str, Any]) -> None:
    reply = post(market(), path, content=json.dumps(BOTH[path] | changes).encode())
    assert reply.status_code in (200, 400, 404), reply.text
    if reply.status_code != 200:
        assert reply.json()["error"]["message"]


@settings(max_examples=100)
@given(
    st.sampled_from(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/models/unload"]),
    st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()),
)
def test_no_body_breaks_the_server(path: str, body: bytes) -> None:
    assert 400 <= post(market(), path, content=body).status_code < 500


MESSAGES = st.lists(
    JSON
    | st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "king"]) | JSON, "content": JSON},
        optional={"name": JSON, "tool_calls": JSON, "other": JSON},
    ),
    max_size=3,
)


@settings(max_examples=150)
@given(MESSAGES, st.dictionaries(st.sampled_from(["mood", "self", "messages", "tools", "bos_token"]), JSON, max_size=2))
def test_no_message_breaks_the_server(messages: list[Any], variables: dict[str, Any]) -> None:
    body = {"model": "m", "messages": messages, "chat_template_kwargs": variables}
    reply = post(market(), "/v1/chat/completions", content=json.dumps(body).encode())
    assert reply.status_code in (200, 400), reply.text


LARGE: dict[str, tuple[dict[str, Any], int, int]] = {
    "biases": ({"prompt": [1], "logit_bias": {str(token): 1 for token in range(60_000)}}, 8, 9),
    "a grammar": ({"prompt": [1], "structured_outputs": {"regex": "a" * 100_000}}, 83, 84),
    "grammars of prompts": ({"prompt": [[1]] * 64, "structured_outputs": {"regex": "a" * 100_000}}, 1, 2),
    "a prompt": ({"prompt": [1] * 200_000}, 41, 42),
}


@pytest.mark.parametrize("name", first_of(2, ["a prompt", "biases", *(name for name in LARGE if "grammar" in name)]))
def test_what_is_large_may_be_had_by_few_sequences(name: str) -> None:
    """Each sequence is sent all of it."""
    body, fits, too_many = LARGE[name]
    behind = market()
    behind.served["m"].spec = spec("m", vocab_size=60_000)
    for n in (fits, too_many):
        reply = post(behind, "/v1/completions", {"model": "m", "n": n} | body)
        told = reply.json().get("error", {}).get("param") == "n"
        assert told == (n == too_many), reply.text[:300]
