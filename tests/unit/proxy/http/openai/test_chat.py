from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit.proxy.http.openai.test_completions import chunks
from tests.unit.proxy.http.scripted import EOS, byte_text, market, post, says, tokens

PATH = "/v1/chat/completions"


def ask(*messages: tuple[str, Any], **parameters: Any) -> dict[str, Any]:
    listed = [{"role": role, "content": content} for role, content in messages or [("user", "hi")]]
    return {"model": "m", "messages": listed} | parameters


def test_a_plain_answer_has_openai_s_form() -> None:
    behind = market(says([*b"hello", EOS]))
    answer = post(behind, PATH, ask(("system", "be"), ("user", "hi")), headers={"x-request-id": "r-1"}).json()
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "id": "chatcmpl-r-1",
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello"},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 29,
            "completion_tokens": 6,
            "total_tokens": 35,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert bytes(behind.submitted[0][1]) == b"[system]be[user]hi[assistant]"


def test_a_stream_begins_with_the_role_and_ends_with_the_reason() -> None:
    said = chunks(post(market(says("ab")), PATH, ask(stream=True, stream_options={"include_usage": True})).text)
    assert [choice["delta"] for chunk in said for choice in chunk["choices"]] == [
        {"role": "assistant", "content": "a"},
        {"content": "b"},
        {},
    ]
    assert [choice["finish_reason"] for chunk in said for choice in chunk["choices"]] == [None, None, "stop"]
    assert {chunk["object"] for chunk in said} == {"chat.completion.chunk"}
    assert said[-1]["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_tell_bytes_and_alternatives(stream: bool) -> None:
    reply = post(market(says("é!")), PATH, ask(logprobs=True, top_logprobs=2, stream=stream))
    parts = chunks(reply.text) if stream else [reply.json()]
    content = [entry for part in parts for entry in part["choices"][0]["logprobs"]["content"]]
    assert [(entry["token"], entry["bytes"]) for entry in content] == [("�", None), ("é", [*"é".encode()]), ("!", [33])]
    assert content[2]["logprob"] == tokens("!")[0].logprob
    assert content[2]["top_logprobs"] == [
        {"token": "!", "logprob": tokens("!")[0].logprob, "bytes": [33]},
        {"token": '"', "logprob": -2.0, "bytes": [34]},
    ]


def test_by_default_an_answer_may_fill_the_context() -> None:
    behind = market()
    post(behind, PATH, ask())
    _, prompt, sampling = behind.submitted[0]
    assert len(prompt) + sampling.max_tokens == 512
    post(behind, PATH, ask(max_completion_tokens=7))
    post(behind, PATH, ask(max_tokens=8))
    assert [sampling.max_tokens for _, _, sampling in behind.submitted[1:]] == [7, 8]
    assert post(behind, PATH, ask(max_tokens=8, max_completion_tokens=9)).status_code == 400


def test_a_conversation_too_long_is_refused_with_both_lengths() -> None:
    error = post(market(), PATH, ask(("user", "x" * 600))).json()["error"]
    assert error["param"] == "messages"
    assert error["code"] == "context_length_exceeded"
    assert "617" in error["message"]
    assert "512" in error["message"]


def test_text_parts_become_lines() -> None:
    behind = market()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert post(behind, PATH, ask(("user", parts))).status_code == 200
    assert bytes(behind.submitted[0][1]) == b"[user]a\nb[assistant]"


def test_the_template_gets_its_variables() -> None:
    behind = market()
    post(behind, PATH, ask(chat_template_kwargs={"mood": "gay"}))
    post(behind, PATH, ask(add_generation_prompt=False))
    assert [bytes(prompt) for _, prompt, _ in behind.submitted] == [b"[user]hi[assistant]gay", b"[user]hi"]


def test_a_reply_can_be_sent_back_as_clients_hold_it() -> None:
    earlier = {"role": "assistant", "content": "hello", "refusal": None, "annotations": [], "audio": None}
    asked = ask() | {"messages": [earlier | {"annotations": None}, earlier, {"role": "user", "content": "hi"}]}
    assert post(market(), PATH, asked).status_code == 200


def test_what_openai_s_client_has_read_of_a_reply_may_come_back_with_it() -> None:
    """Its `parse` and `stream` add it, and do not leave it out of what they send."""
    function = {"name": "f", "arguments": '{"a": 1}', "parsed_arguments": {"a": 1}}
    call = {"id": "c", "type": "function", "function": function, "index": 0}
    earlier = [
        {"role": "assistant", "content": '{"a": 1}', "parsed": {"a": 1}},
        {"role": "assistant", "content": None, "parsed": None, "tool_calls": [call]},
    ]
    behind = market(text=byte_text("{{ messages | tojson }}"))
    assert post(behind, PATH, {"model": "m", "messages": [*earlier, {"role": "user", "content": "hi"}]}).is_success
    plain = [
        {"role": "assistant", "content": '{"a": 1}'},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
            "content": "",
        },
        {"role": "user", "content": "hi"},
    ]
    assert json.loads(bytes(behind.submitted[0][1])) == plain


def test_a_call_may_have_an_integer_beyond_64_bits() -> None:
    """As models make them: the turn after it is no error."""
    number = "123456789012345678901234567890"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f'{{"a": {number}}}'}}
    asked = {"model": "m", "messages": [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "hi"}]}
    behind = market(text=byte_text("{{ messages[0].tool_calls[0].function.arguments | tojson }}"))
    assert post(behind, PATH, asked).status_code == 200
    assert json.loads(bytes(behind.submitted[0][1])) == {"a": int(number)}


@pytest.mark.parametrize("arguments", ['{"a": 1', "", "[1]", "null", "x"])
def test_a_call_that_was_cut_off_counts_as_having_no_arguments(arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "what?"}]
    behind = market(text=byte_text("{{ messages[0].tool_calls[0].function.arguments | tojson }}"))
    assert post(behind, PATH, {"model": "m", "messages": messages}).status_code == 200
    assert bytes(behind.submitted[0][1]) == b"{}"
    call["function"] = {"name": "f", "arguments": 5}
    error = post(behind, PATH, {"model": "m", "messages": messages}).json()["error"]
    assert error["param"] == "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens", "min_tokens"])
def test_a_limit_beyond_the_context_is_called_as_it_was_given(limit: str) -> None:
    error = post(market(), PATH, ask(**{limit: 5000})).json()["error"]
    assert (error["param"], error["code"]) == (limit, "context_length_exceeded")


@pytest.mark.parametrize(
    ("template", "effort", "prompt"),
    [
        ("{{ enable_thinking }}, {{ reasoning_effort }}", "low", b"True, low"),
        ("{{ enable_thinking }}", "none", b"False"),
        ("{{ reasoning_effort is defined }}", None, b"False"),
    ],
)
def test_an_effort_is_told_to_templates_that_know_it(template: str, effort: str | None, prompt: bytes) -> None:
    behind = market(text=byte_text(template))
    post(behind, PATH, ask(reasoning_effort=effort))
    assert bytes(behind.submitted[0][1]) == prompt


def test_a_variable_of_its_own_comes_before_the_effort() -> None:
    behind = market(text=byte_text("{{ enable_thinking }}"))
    post(behind, PATH, ask(reasoning_effort="none", chat_template_kwargs={"enable_thinking": "yes"}))
    assert bytes(behind.submitted[0][1]) == b"yes"
    error = post(behind, PATH, ask(reasoning_effort="hardly")).json()["error"]
    assert (error["param"], len(behind.submitted)) == ("reasoning_effort", 1)


def test_what_no_answer_needs_is_told_of_and_served_all_the_same() -> None:
    reply = post(market(), PATH, ask(metadata={"a": "b"}, store=True, verbosity="low"))
    assert (reply.status_code, reply.headers["x-aegis-ignored"]) == (200, "metadata, store, verbosity")
    nothing = {"metadata": {}, "store": False, "verbosity": None, "prompt_cache_key": "a", "safety_identifier": "b"}
    reply = post(market(), PATH, ask(**nothing))
    assert (reply.status_code, reply.headers.get("x-aegis-ignored")) == (200, None)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "king", "content": "x"}, "messages[0].role"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "x", "mood": "y"}, "messages[0].mood"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls[0].id"),
        ("x", "messages[0]"),
    ],
)
def test_a_wrong_message_is_refused_by_its_place(message: Any, param: str) -> None:
    reply = post(market(), PATH, {"model": "m", "messages": [message]})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_what_the_template_refuses_is_400() -> None:
    reply = post(market(text=byte_text("{{ raise_exception('roles must alternate') }}")), PATH, ask())
    assert reply.status_code == 400
    assert "roles must alternate" in reply.json()["error"]["message"]
    for template in ("{{ 1 // 0 }}", "{{ messages[7].content.x }}", "{{ messages + 1 }}"):
        assert post(market(text=byte_text(template)), PATH, ask()).status_code == 400


def test_models_that_cannot_chat_say_what_to_do() -> None:
    for text, hint in ((byte_text(None), "no chat template"), (None, "no tokenizer")):
        reply = post(market(text=text), PATH, ask())
        assert reply.status_code == 400
        assert hint in reply.json()["error"]["message"]
        assert "/v1/completions" in reply.json()["error"]["message"]


def test_an_empty_rendering_is_refused() -> None:
    reply = post(market(text=byte_text("{{ '' }}")), PATH, ask())
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")


def test_stream_and_whole_answer_are_equal_with_stop_strings() -> None:
    behind = market(says("Grüße €uro END more"))
    whole = post(behind, PATH, ask(stop=["END"])).json()["choices"][0]["message"]["content"]
    said = chunks(post(behind, PATH, ask(stop=["END"], stream=True)).text)
    streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in said)
    assert whole == streamed == "Grüße €uro "
    assert "E" not in json.dumps([chunk["choices"][0]["delta"] for chunk in said])
