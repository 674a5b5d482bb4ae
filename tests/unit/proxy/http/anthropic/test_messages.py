"""`/v1/messages` of the application: what becomes of a conversation, and how its answer is worded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from aegis.core.errors import UserError
from aegis.core.request import FinishReason
from aegis.engine.grammar.trials import GrammarTrials
from proxy.http.market import Delta, Failed, Finished, Reused
from tests.event_laws import check_messages, events_of
from tests.unit.proxy.http.scripted import EOS, byte_text, calling, keyring, market, post, says, tokens

PATH = "/v1/messages"
THINKING = "{{ tools }}<think></think>{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TEMPLATE = (
    "{{ tools }}<tool_call>{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls %}({{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}"
)
TOOL = {"name": "f", "description": "of x", "input_schema": {"type": "object", "properties": {"a": {}}}}
TEXT = {"type": "text", "text": "done"}
CALLED = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def trials() -> Iterator[GrammarTrials]:
    opened = GrammarTrials()
    yield opened
    opened.close()


def ask(*content: Any, **parameters: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": each} for each in content or ("hi",)]
    return {"model": "m", "max_tokens": 100, "messages": turns} | parameters


def prompt_of(behind: Any) -> str:
    return bytes(token for token in behind.submitted[-1][1] if token < 256).decode()


def test_a_plain_answer_has_anthropic_s_form() -> None:
    behind = market(says([*b"hello", EOS]))
    reply = post(behind, PATH, ask(system="be"), headers={"x-request-id": "r-1", "anthropic-version": "1999-01-01"})
    assert reply.json() == {
        "id": "msg_r-1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 29,
            "output_tokens": 6,
            "output_tokens_details": {"thinking_tokens": 0},
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }
    assert prompt_of(behind) == "[system]be[user]hi[assistant]"
    assert behind.submitted[0][2].max_tokens == 100
    assert reply.headers["request-id"] == "r-1"
    assert behind.answers == [("/v1/messages", 200)]


def test_a_stream_is_the_whole_answer_by_named_events() -> None:
    events = events_of(post(market(says("ab")), PATH, ask(stream=True)).text)
    check_messages(events)
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 2


def test_tokens_that_were_kept_from_before_are_told_apart() -> None:
    def script(prompt: Any, sampling: Any) -> list[Any]:
        return [Reused(8), Delta(tokens("x")), Finished(FinishReason.STOP)]

    usage = post(market(script), PATH, ask()).json()["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (19 - 8, 8)
    events = events_of(post(market(script), PATH, ask(stream=True)).text)
    assert events[-2]["usage"]["cache_read_input_tokens"] == 8


@pytest.mark.parametrize("billing", ["x-anthropic-billing-header: cc_version=2.1; cch=a1;", "x-anthropic-other: 5\n"])
def test_a_header_before_the_instructions_is_no_part_of_the_prompt(billing: str) -> None:
    behind = market()
    for system in ([{"type": "text", "text": billing}, {"type": "text", "text": "be"}], billing.rstrip() + "\nbe"):
        assert post(behind, PATH, ask(system=system)).status_code == 200
        assert prompt_of(behind) == "[system]be[user]hi[assistant]"
    post(behind, PATH, ask(system=[{"type": "text", "text": "be"}, {"type": "text", "text": billing + "x"}]))
    assert "x-anthropic" in prompt_of(behind), "only at the beginning"
    post(behind, PATH, ask(system=[{"type": "text", "text": billing}]))
    assert prompt_of(behind) == "[user]hi[assistant]"


def test_the_blocks_of_a_conversation_reach_the_template_in_their_order() -> None:
    behind = market(says("x"), text=byte_text(TEMPLATE))
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "two"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm ", "signature": "s"},
                {"type": "redacted_thinking", "data": "?"},
                {"type": "text", "text": "so"},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "tool_reference"}, TEXT]},
                {"type": "tool_result", "tool_use_id": "c2", "is_error": True},
                {"type": "text", "text": "go"},
            ],
        },
    ]
    reply = post(behind, PATH, ask(messages=turns))
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-aegis-ignored"] == "messages[3].content[0].content[0] (tool_reference)"
    said = '[user]one\ntwo[assistant]hm so(c1 f {"a": 1})[tool]donec1[tool]c2[user]go'
    assert prompt_of(behind).endswith("<tool_call>" + said)


@pytest.mark.parametrize("content", [[], [{"type": "container_upload", "file_id": "x"}]])
def test_a_turn_that_says_nothing_is_one(content: list[Any]) -> None:
    behind = market()
    assert post(behind, PATH, ask(content)).status_code == 200
    assert prompt_of(behind) == "[user][assistant]"


@pytest.mark.parametrize("per_delivery", [1, 7, 1000])
def test_a_call_is_a_block_with_an_object(per_delivery: int) -> None:
    behind = market(says("well " + CALLED, per_delivery=per_delivery), text=byte_text(TEMPLATE))
    whole = post(behind, PATH, ask(tools=[TOOL]), headers={"x-request-id": "r"}).json()
    text, call = whole["content"]
    assert text["text"].strip() == "well"
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "f", {"a": 1})
    assert whole["stop_reason"] == "tool_use"
    events = events_of(post(behind, PATH, ask(tools=[TOOL], stream=True), headers={"x-request-id": "r"}).text)
    check_messages(events)
    (begun,) = [event["content_block"] for event in events if event.get("content_block", {}).get("type") == "tool_use"]
    assert begun == call | {"input": {}}
    given = [event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"]
    assert json.loads("".join(given)) == {"a": 1}
    assert '"of x"' in prompt_of(behind).replace("'", '"')


@pytest.mark.parametrize(
    ("choice", "called"),
    [({"type": "tool", "name": "f"}, '{"a": 1}'), ({"type": "any"}, '[{"name": "f", "arguments": {"a": 1}}]')],
)
def test_a_call_that_is_demanded_is_held_to_its_schema(
    trials: GrammarTrials, choice: dict[str, Any], called: str
) -> None:
    behind = market(says(called), text=byte_text(TEMPLATE))
    whole = post(behind, PATH, ask(tools=[TOOL], tool_choice=choice), trials).json()
    assert [block["input"] for block in whole["content"]] == [{"a": 1}]
    assert whole["stop_reason"] == "tool_use"
    assert behind.submitted[-1][2].grammar is not None


def test_a_call_that_is_cut_off_before_its_arguments_is_no_text(trials: GrammarTrials) -> None:
    said = '[{"name": "f", "arguments": {"a": 1}}, {"name": "f", "arg'
    behind = market(says(said, reason=FinishReason.LENGTH), text=byte_text(TEMPLATE))
    asked = ask(tools=[TOOL], tool_choice={"type": "any"})
    (block,) = post(behind, PATH, asked, trials).json()["content"]
    assert (block["type"], block["input"]) == ("tool_use", {"a": 1})
    events = events_of(post(behind, PATH, asked | {"stream": True}, trials).text)
    check_messages(events)
    assert [event["content_block"]["type"] for event in events if "content_block" in event] == ["tool_use"]
    behind = market(says(said[:8], reason=FinishReason.LENGTH), text=byte_text(TEMPLATE))
    assert post(behind, PATH, asked, trials).json()["content"] == []


def test_tools_of_the_vendor_s_server_are_ignored_and_told_of() -> None:
    behind = market(says("x"), text=byte_text(TEMPLATE))
    search = {"type": "web_search_20250305", "name": "web_search"}
    reply = post(behind, PATH, ask(tools=[search, TOOL], mcp_servers=[{"name": "x"}]))
    assert reply.status_code == 200
    assert reply.headers["x-aegis-ignored"] == "tools[0] (web_search_20250305), mcp_servers"
    assert "web_search" not in prompt_of(behind) and "of x" in prompt_of(behind)
    only = post(market(), PATH, ask(tools=[search], tool_choice={"type": "auto"}))
    assert only.status_code == 200, "a template without tools is asked for none"


@pytest.mark.parametrize("per_delivery", [1, 3, 1000])
def test_reasoning_is_a_block_of_its_own_and_its_tokens_are_counted(per_delivery: int) -> None:
    behind = market(says("<think>hmm</think>so", per_delivery=per_delivery), text=byte_text(THINKING))
    whole = post(behind, PATH, ask()).json()
    thinking, text = whole["content"]
    assert (thinking["type"], thinking["thinking"], text["text"]) == ("thinking", "hmm", "so")
    assert thinking["signature"]
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] == len("<think>hmm</think>")
    events = events_of(post(behind, PATH, ask(stream=True)).text)
    check_messages(events)
    assert events[-2]["usage"] == whole["usage"]


@pytest.mark.parametrize(("kind", "said"), [("disabled", "False"), ("enabled", "True"), ("adaptive", "True")])
def test_thinking_is_a_variable_of_templates_that_know_it(kind: str, said: str) -> None:
    behind = market(text=byte_text("{{ enable_thinking }}"))
    post(behind, PATH, ask(thinking={"type": kind, "budget_tokens": 1024}))
    assert prompt_of(behind) == said


@pytest.mark.parametrize("stream", [False, True])
def test_why_an_answer_ended(stream: bool) -> None:
    def ended(script: Any, **parameters: Any) -> tuple[str, str | None]:
        reply = post(market(script), PATH, ask(stream=stream, **parameters))
        if not stream:
            return reply.json()["stop_reason"], reply.json()["stop_sequence"]
        events = events_of(reply.text)
        check_messages(events)
        return events[-2]["delta"]["stop_reason"], events[-2]["delta"]["stop_sequence"]

    assert ended(says("one two"), stop_sequences=["zz", "tw"]) == ("stop_sequence", "tw")
    assert ended(says("abc", reason=FinishReason.LENGTH), max_tokens=3) == ("max_tokens", None)
    assert ended(says("abc", reason=FinishReason.LENGTH), max_tokens=9999) == ("model_context_window_exceeded", None)
    assert ended(says("")) == ("end_turn", None)


def test_an_answer_ends_where_the_model_has_no_room_left() -> None:
    behind = market()
    assert post(behind, PATH, ask(max_tokens=1_000_000)).status_code == 200
    _, prompt, sampling = behind.submitted[0]
    assert len(prompt) + sampling.max_tokens == 512
    refused = post(behind, PATH, ask("x" * 600))
    assert refused.status_code == 400
    assert "context of 512 tokens" in refused.json()["error"]["message"]


def test_output_is_held_to_a_schema(trials: GrammarTrials) -> None:
    behind = market(says('{"a": 1}'))
    wanted = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    for parameters in ({"output_config": {"format": wanted, "effort": "low"}}, {"output_format": wanted}):
        assert post(behind, PATH, ask(**parameters), trials).status_code == 200
        grammar = behind.submitted[-1][2].grammar
        assert grammar and json.loads(grammar.text) == wanted["schema"]
    wrong = {"type": "json_schema", "schema": {"not": {}}}
    message = post(behind, PATH, ask(output_config={"format": wrong}), trials).json()["error"]["message"]
    assert message.startswith("'output_config.format.schema")


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"max_tokens": None}, "'max_tokens' is required"),
        ({"messages": []}, "'messages' must hold at least one message"),
        ({"messages": [5]}, "'messages[0]' must be an object"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "'messages[0].role'"),
        ({"messages": [{"role": "user", "content": 5}]}, "'messages[0].content'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "'messages[0].content[0]'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "'messages[0].content[0].text'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "'messages[0]' is the model's"),
        ({"stop_sequences": [""]}, "'stop_sequences'"),
        ({"temperature": 5}, "'temperature'"),
        ({"thinking": {"type": "x"}}, "'thinking.type'"),
        *[
            (
                {"thinking": {"type": "enabled", "budget_tokens": budget}},
                "'thinking.budget_tokens' must be an integer of 1 or more, not ",
            )
            for budget in (0, -1, 1.5, True, "1024", [1])
        ],
        ({"tools": [{"name": "f"}]}, "'tools[0].input_schema'"),
        ({"system": [{"type": "image"}]}, "'system[0]'"),
        ({"maxtokens": 5}, "unknown parameter 'maxtokens'; did you mean 'max_tokens'?"),
    ],
)
def test_bad_input_is_refused_in_anthropic_s_form(parameters: dict[str, Any], said: str) -> None:
    reply = post(market(), PATH, ask(**parameters), headers={"x-request-id": "r"})
    assert reply.status_code == 400
    told = reply.json()
    assert told["error"]["message"].startswith(said), told
    assert told == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": told["error"]["message"]},
        "request_id": "r",
    }


@pytest.mark.parametrize("name", ["metadata", "output_config", "output_format"])
def test_what_adds_nothing_to_the_prompt_is_checked_also_where_its_tokens_are_counted(name: str) -> None:
    body = ask(**{name: "x"})
    del body["max_tokens"]
    for reply in (post(market(), PATH + "/count_tokens", body), post(market(), PATH, body | {"max_tokens": 9})):
        assert reply.status_code == 400
        assert reply.json()["error"]["message"] == f"'{name}' must be an object, not 'x'"


@pytest.mark.parametrize(("schema", "choice"), [({"not": {}}, "any"), ({"type": "string"}, "auto")], ids=str)
def test_a_wrong_schema_is_refused_by_its_place_here(schema: dict[str, Any], choice: str) -> None:
    tools = [{"type": "bash_20250124", "name": "bash"}, TOOL | {"input_schema": schema}]
    reply = post(market(text=byte_text(TEMPLATE)), PATH, ask(tools=tools, tool_choice={"type": choice}))
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["message"].startswith("'tools[1].input_schema"), reply.text


def test_strict_calls_are_kept_to_where_the_model_can_be_held_to_them(trials: GrammarTrials) -> None:
    tools = [{"type": "bash_20250124", "name": "bash"}, TOOL | {"strict": True}]
    behind = market(says("x"), text=byte_text(TEMPLATE))
    assert post(behind, PATH, ask(tools=tools), trials).headers["x-aegis-ignored"] == "tools[0] (bash_20250124)"
    grammar = behind.submitted[0][2].grammar
    assert grammar and grammar.kind == "structural_tag"
    listed = market(text=byte_text('{{ tools }}"parameters"{{ messages }}'))
    told = post(listed, PATH, ask(tools=tools)).headers["x-aegis-ignored"]
    assert told == "tools[0] (bash_20250124), tools[1].strict"
    wrong = post(behind, PATH, ask(tools=[tools[0], TOOL | {"strict": 1}])).json()["error"]["message"]
    assert wrong == "'tools[1].strict' must be true or false, not 1"


def test_a_choice_of_tools_needs_tools_but_for_those_that_are_ignored() -> None:
    choice = {"type": "tool", "name": "look"}
    reply = post(market(text=byte_text(TEMPLATE)), PATH, ask(tool_choice=choice))
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "'tool_choice' needs 'tools'"), reply.text
    assert post(market(text=byte_text(TEMPLATE)), PATH, ask(tool_choice={"type": "no"})).status_code == 400
    bash = {"type": "bash_20250124", "name": "bash"}
    assert post(market(text=byte_text(TEMPLATE)), PATH, ask(tools=[bash], tool_choice=choice)).status_code == 200


def test_parameters_of_betas_are_tolerated() -> None:
    body = ask(something_new={"x": 1})
    assert post(market(), PATH, body).status_code == 400
    for request in ({"params": {"beta": "true"}}, {"headers": {"anthropic-beta": "new-2027-01-01"}}):
        reply = post(market(), PATH, body, **request)
        assert (reply.status_code, reply.headers["x-aegis-ignored"]) == (200, "something_new")


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (UserError("later", status=429, kind="rate_limit_error"), 429, "rate_limit_error"),
        (UserError("ends", status=503, kind="server_error"), 503, "overloaded_error"),
    ],
)
def test_refusals_have_their_kinds(refusal: UserError, status: int, kind: str) -> None:
    behind = market()
    behind.refusals = [refusal]
    reply = post(behind, PATH, ask())
    assert (reply.status_code, reply.json()["error"]["type"], reply.headers["retry-after"]) == (status, kind, "1")
    assert post(behind, PATH, ask(model="x")).json()["error"]["type"] == "not_found_error"
    assert post(behind, PATH + "/nothing").json()["error"]["type"] == "not_found_error"


def test_a_stream_that_fails_ends_with_an_error() -> None:
    def script(prompt: Any, sampling: Any) -> list[Any]:
        return [Delta(tokens("a")), Failed("broke")]

    events = events_of(post(market(script), PATH, ask(stream=True)).text)
    check_messages(events)
    assert events[-1]["error"] == {"type": "api_error", "message": "broke"}


def test_keys_come_in_either_header() -> None:
    def asked(**headers: str) -> int:
        keys = keyring(alice="secret")
        reply = calling(market(), lambda client: client.post(PATH, json=ask(), headers=headers), keys=keys)
        assert reply.status_code == 200 or reply.json()["error"]["type"] == "authentication_error"
        return int(reply.status_code)

    assert asked() == 401
    assert asked(**{"x-api-key": "wrong"}) == 401
    assert asked(**{"x-api-key": "secret"}) == 200
    assert asked(authorization="Bearer secret") == 200
    assert asked(**{"authorization": "Bearer wrong", "x-api-key": "secret"}) == 200


def test_tokens_are_counted_as_they_are_prompted() -> None:
    behind = market(says("x"), text=byte_text(TEMPLATE))
    body = ask("hello", system="be", tools=[TOOL])
    post(behind, PATH, body)
    del body["max_tokens"]
    reply = post(behind, PATH + "/count_tokens", body)
    assert reply.json() == {"input_tokens": len(behind.submitted[0][1])}
    assert len(behind.submitted) == 1
    refused = post(behind, PATH + "/count_tokens", ask())
    assert refused.status_code == 400 and "'max_tokens'" in refused.json()["error"]["message"]


def test_who_asks_whether_there_is_a_server_is_told() -> None:
    assert calling(market(), lambda client: client.head("/", follow_redirects=True)).status_code == 200
