"""Tools: rendered through the template, found in what models say, streamed as OpenAI streams them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xgrammar import GrammarMatcher

from aegis.core.request import FinishReason
from aegis.engine.grammar.compiler import compile_grammar, read_vocabulary
from aegis.engine.grammar.trials import GrammarTrials
from proxy.http.openai.chat_reader import ChatReader, Reading
from proxy.http.streaming.reply_parts import CallArguments, CallBegun, Part, TextPart
from proxy.http.structured.tool_calls import HERMES, LISTED, LLAMA, MISTRAL, Balance, CallFinder, ToolForm
from tests.unit.proxy.http.scripted import byte_text, market, post, says

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/c"}},
            "$defs": {"c": {"type": "string"}},
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}</tool_call>{% endfor %}{% endfor %}"
)
ASKED: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [WEATHER, TIME],
}
PARIS, ROME = '{"city": "Paris"}', '{"city": "Ro\\"}me", "n": [1, {}]}'

Calls = list[tuple[str, str]]
SAID: list[tuple[ToolForm, str, str, Calls]] = [
    (HERMES, "just text", "just text", []),
    (
        HERMES,
        'ok <tool_call>\n{"name": "weather", "arguments": ' + PARIS + "}\n</tool_call>",
        "ok",
        [("weather", PARIS)],
    ),
    (
        HERMES,
        '<tool_call>{"name": "a", "arguments": '
        + PARIS
        + '}</tool_call>\n<tool_call>{"name": "b", "arguments": '
        + ROME
        + "}</tool_call>",
        "",
        [("a", PARIS), ("b", ROME)],
    ),
    (HERMES, '<tool_call>{"arguments": {}, "name": "b"}</tool_call> bye', "bye", [("b", "{}")]),
    (HERMES, '<tool_call>{"name": "b"}</tool_call>', "", [("b", "{}")]),
    (HERMES, "<tool_call>{nonsense}</tool_call>", "<tool_call>{nonsense}</tool_call>", []),
    (HERMES, "a <tool_ca b", "a <tool_ca b", []),
    (HERMES, "put it in <tool_call> tags", "put it in <tool_call> tags", []),
    (HERMES, "between \n<tool_call>\n</tool_call>, so", "between \n<tool_call>\n</tool_call>, so", []),
    (
        HERMES,
        '<tool_call>\n{"name": "a", "arguments": {}}\n<tool_call>\n{"name": "b", "arguments": {}}',
        "",
        [("a", "{}"), ("b", "{}")],
    ),
    (HERMES, "<tool_call>", "<tool_call>", []),
    (HERMES, '<tool_call>{"name": "b", "arguments": {"x', "", [("b", '{"x')]),
    (LLAMA, '{"name": "weather", "parameters": ' + PARIS + "}", "", [("weather", PARIS)]),
    (LLAMA, ' <|python_tag|>{"name": "weather", "parameters": ' + PARIS + "}", "", [("weather", PARIS)]),
    (
        LLAMA,
        '{"name": "a", "parameters": ' + PARIS + '}; {"name": "b", "parameters": ' + ROME + "}",
        "",
        [("a", PARIS), ("b", ROME)],
    ),
    (LLAMA, '{"a": [1, 2]}, and more', '{"a": [1, 2]}, and more', []),
    (LLAMA, "[1, 2]", "[1, 2]", []),
    (LLAMA, "It is {sunny}", "It is {sunny}", []),
    (MISTRAL, '[TOOL_CALLS] [{"name": "a", "arguments": ' + ROME + ', "id": "123456789"}]', "", [("a", ROME)]),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "a", "arguments": ' + ROME + '}, {"name": "b", "arguments": {}}]',
        "",
        [("a", ROME), ("b", "{}")],
    ),
    (MISTRAL, "so[TOOL_CALLS]a[ARGS]" + ROME + "[TOOL_CALLS]b[CALL_ID]xyz[ARGS]{}", "so", [("a", ROME), ("b", "{}")]),
    (
        LISTED,
        '[{"name": "a", "arguments": ' + PARIS + '}, {"name": "b", "arguments": {}}]',
        "",
        [("a", PARIS), ("b", "{}")],
    ),
]


def found(finder: CallFinder, pieces: list[str]) -> tuple[str, Calls]:
    parts: list[Part] = [part for piece in pieces for part in finder.feed(piece)] + finder.end()
    text = "".join(part.text for part in parts if isinstance(part, TextPart))
    calls: Calls = []
    for part in parts:
        match part:
            case CallBegun(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, more):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + more)
    return text, calls


@pytest.mark.parametrize(("form", "reply", "text", "calls"), SAID, ids=lambda x: str(x)[:40])
def test_calls_are_found_wherever_the_reply_is_cut(form: ToolForm, reply: str, text: str, calls: Calls) -> None:
    assert found(CallFinder(form), [reply]) == (text, calls)
    assert found(CallFinder(form), list(reply)) == (text, calls)
    for cut in range(len(reply)):
        assert found(CallFinder(form), [reply[:cut], reply[cut:]]) == (text, calls)


WORDS = [HERMES.begin, HERMES.end, LLAMA.begin, MISTRAL.begin, "[ARGS]", "f", "{", "}", "[", ",", "\n", '"', "<"]
WORDS += ['{"name": "f", "arguments": {"a": 1}}', '{"arguments": {"b": "}"}, "name": "f"}', '{"a": 1}', '{"name": "f"']


@given(
    st.sampled_from([HERMES, LLAMA, MISTRAL]),
    st.text('<tol_ca>[TOL_CS]{}"\\:, name', max_size=60) | st.lists(st.sampled_from(WORDS), max_size=8).map("".join),
    st.integers(0, 60),
)
def test_whatever_is_said_the_cuts_change_nothing_and_no_text_is_lost(form: ToolForm, reply: str, cut: int) -> None:
    text, calls = found(CallFinder(form), [reply])
    assert found(CallFinder(form), [reply[:cut], reply[cut:]]) == (text, calls)
    assert calls or text == reply


BARE: list[tuple[str, str, Calls]] = [
    ('{"name": "Alice", "age": 30}', '{"name": "Alice", "age": 30}', []),
    ('{"name": "weather", "age": 30}', '{"name": "weather", "age": 30}', []),
    ('{"age": 30, "name": "weather"}', '{"age": 30, "name": "weather"}', []),
    ('{"name": "Alice", "arguments": {}}', '{"name": "Alice", "arguments": {}}', []),
    ('{"name": "weather"}', "", [("weather", "{}")]),
    ('{"type": "function", "name": "weather", "parameters": ' + PARIS + "}", "", [("weather", '{"city":"Paris"}')]),
]


@pytest.mark.parametrize(("reply", "text", "calls"), BARE)
def test_an_answer_in_json_is_no_call_of_a_tool_that_there_is_not(reply: str, text: str, calls: Calls) -> None:
    for cut in range(len(reply)):
        assert found(CallFinder(LLAMA, names=["weather"]), [reply[:cut], reply[cut:]]) == (text, calls)


def test_an_answer_in_json_is_told_as_soon_as_it_can_be_no_call() -> None:
    finder = CallFinder(LLAMA, names=["weather"])
    assert finder.feed('{"city":') == [TextPart('{"city":')]
    assert finder.feed('"Paris"') == [TextPart('"Paris"')]


def test_an_object_is_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, feed = [0], Balance.feed

    def counted(balance: Balance, text: str) -> int | None:
        looked[0] += len(text)
        return feed(balance, text)

    monkeypatch.setattr(Balance, "feed", counted)
    reply = '{"type": "function", "parameters": {"text": "' + "x" * 2000 + '"}, "name": "weather"}'
    assert found(CallFinder(LLAMA, names=["weather"]), list(reply))[1][0][0] == "weather"
    assert looked[0] == len(reply)


def test_text_without_a_call_is_told_before_the_reply_ends() -> None:
    assert CallFinder(HERMES).feed("hello") == [TextPart("hello")]
    assert CallFinder(LLAMA).feed("hello") == [TextPart("hello")]


def test_one_call_only_where_no_more_are_wanted() -> None:
    reply = '[{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]'
    assert found(CallFinder(LISTED, most=1), [reply])[1] == [("a", "{}")]


LIST = '[{"name": "a", "arguments": ' + PARIS + '}, {"name": "b", "arguments": {"x": 1}}]'


def test_a_list_of_calls_that_is_cut_off_has_no_text() -> None:
    begun = [(name, given, LIST.index(given)) for name, given in (("a", PARIS), ("b", '{"x": 1}'))]
    for cut in range(len(LIST)):
        calls = [(name, given[: cut - at]) for name, given, at in begun if cut > at]
        assert found(CallFinder(LISTED), [LIST[:cut]]) == ("", calls)
        assert found(CallFinder(LISTED), list(LIST[:cut])) == ("", calls)


def test_a_mark_of_the_end_that_is_cut_off_is_no_text() -> None:
    call = '<tool_call>\n{"name": "weather", "arguments": ' + PARIS + "}"
    for reply in (call, call + "\n" + call):
        calls = [("weather", PARIS)] * reply.count("weather")
        for cut in range(len("\n</tool_call>") + 1):
            said = reply + "\n</tool_call>"[:cut]
            assert found(CallFinder(HERMES), [said]) == ("", calls)
            assert found(CallFinder(HERMES), list(said)) == ("", calls)
    assert found(CallFinder(HERMES), ["<tool_call></tool"]) == ("<tool_call></tool", [])


# --- over HTTP ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trials() -> Iterator[GrammarTrials]:
    opened = GrammarTrials()
    yield opened
    opened.close()


def ask(reply: str, body: dict[str, Any] | None = None, template: str = TEMPLATE, **more: Any) -> Any:
    behind = market(says(reply), text=byte_text(template))
    answer = post(behind, "/v1/chat/completions", ASKED | (body or {}), **more)
    return behind, answer


def test_a_call_is_told_whole() -> None:
    behind, reply = ask('Well. <tool_call>\n{"name": "weather", "arguments": ' + PARIS + "}\n</tool_call>")
    choice = reply.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well."
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"] == {"name": "weather", "arguments": PARIS}
    assert json.dumps(WEATHER["function"]["description"]) in bytes(behind.submitted[0][1]).decode()


def test_an_answer_that_has_a_format_of_its_own_is_no_call(trials: GrammarTrials) -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}}
    llama = TEMPLATE + '{# "parameters" #}'
    _, reply = ask('{"name": "weather"}', asked, llama, trials=trials)
    choice = reply.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('{"name": "weather"}', "stop")


def test_a_call_is_streamed_by_its_arguments() -> None:
    _, reply = ask('<tool_call>{"name": "weather", "arguments": ' + PARIS + "}</tool_call>", {"stream": True})
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert calls[0]["function"] == {"name": "weather", "arguments": "{"} and calls[0]["type"] == "function"
    assert all(call.keys() == {"index", "function"} for call in calls[1:])
    assert len(calls) > 5
    assert "".join(call["function"]["arguments"] for call in calls) == PARIS
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert not any(delta.get("content") for delta in deltas)


def test_a_chunk_has_one_part_of_each_call() -> None:
    said = '<tool_call>{"name": "weather", "arguments": ' + PARIS + "}</tool_call>"
    behind = market(says(said + said, per_delivery=1000), text=byte_text(TEMPLATE))
    reply = post(behind, "/v1/chat/completions", ASKED | {"stream": True})
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert [(call["index"], call["function"]["arguments"]) for call in calls] == [(0, PARIS), (1, PARIS)]


def test_a_required_call_is_held_to_the_tools(trials: GrammarTrials) -> None:
    said = '[{"name": "weather", "arguments": ' + PARIS + "}]"
    behind, reply = ask(said, {"tool_choice": "required", "parallel_tool_calls": False}, trials=trials)
    choice = reply.json()["choices"][0]
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": PARIS}
    assert choice["finish_reason"] == "tool_calls"
    schema = json.loads(behind.submitted[0][2].grammar.text)
    assert schema["maxItems"] == 1
    assert schema["$defs"]["tool0"]["properties"]["city"] == {"$ref": "#/$defs/tool0/$defs/c"}


@pytest.mark.parametrize(("said", "calls"), [('[{"name": "', 0), ('[{"name": "time", "arguments": {}}, {"name": "', 1)])
def test_a_required_call_that_is_cut_off_is_no_content(trials: GrammarTrials, said: str, calls: int) -> None:
    behind = market(says(said, reason=FinishReason.LENGTH), text=byte_text(TEMPLATE))
    asked = ASKED | {"tool_choice": "required"}
    (choice,) = post(behind, "/v1/chat/completions", asked, trials).json()["choices"]
    assert choice["finish_reason"] == "length"
    message = choice["message"]
    assert (message["content"], len(message.get("tool_calls", []))) == (None if calls else "", calls)
    streamed = post(behind, "/v1/chat/completions", asked | {"stream": True}, trials).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert not any(chunk["choices"][0]["delta"].get("content") for chunk in chunks)


def test_a_call_that_is_cut_off_in_the_mark_of_its_end_is_no_content() -> None:
    behind = market(says(CALL[:-1], reason=FinishReason.LENGTH), text=byte_text(TEMPLATE))
    (choice,) = post(behind, "/v1/chat/completions", ASKED).json()["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": PARIS}
    streamed = post(behind, "/v1/chat/completions", ASKED | {"stream": True}).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert not any(chunk["choices"][0]["delta"].get("content") for chunk in chunks)


def test_a_named_call_is_its_arguments(trials: GrammarTrials) -> None:
    choice_of = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    behind, reply = ask(PARIS, choice_of, trials=trials)
    choice = reply.json()["choices"][0]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": PARIS}
    assert choice["finish_reason"] == "stop"
    assert json.loads(behind.submitted[0][2].grammar.text) == WEATHER["function"]["parameters"]


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    """A choice among several, which are names or entries."""
    named = [{"type": "function", "function": {"name": each}} if isinstance(each, str) else each for each in tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


def test_of_the_tools_only_those_that_are_allowed_can_be_called(trials: GrammarTrials) -> None:
    said = json.dumps([{"name": "weather", "arguments": json.loads(PARIS)}])
    behind, reply = ask(said, {"tool_choice": allowed("required", "weather")}, trials=trials)
    (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert fitting(behind, said) and not fitting(behind, said.replace("weather", "time"))
    behind, reply = ask("none", {"tool_choice": allowed("auto", "time")}, trials=trials)
    assert reply.json()["choices"][0]["message"]["content"] == "none"
    prompt = bytes(behind.submitted[0][1]).decode()
    assert "time" in prompt and "weather" not in prompt


STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}


def test_calls_that_are_free_to_be_made_are_held_to_strict_schemas(trials: GrammarTrials) -> None:
    behind, reply = ask("no call", {"tools": [STRICT, TIME]}, trials=trials)
    assert reply.json()["choices"][0]["message"] == {"role": "assistant", "content": "no call"}
    grammar = behind.submitted[0][2].grammar
    compiled = compile_grammar(read_vocabulary(byte_text().to_json(), size=258, ends=(257,)), grammar)

    def fits(said: str) -> bool:
        matcher = GrammarMatcher(compiled.grammar)
        return all(matcher.accept_token(token) for token in said.encode()) and bool(matcher.accept_token(257))

    assert fits("no call")
    assert fits('so <tool_call>\n{"name": "weather", "arguments": ' + PARIS + "}\n</tool_call>")
    assert not fits('<tool_call>\n{"name": "weather", "arguments": {"city": 5}}\n</tool_call>')


ANSWER = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": ' + PARIS + "}\n</tool_call>"


def fitting(behind: Any, said: str) -> bool:
    """Whether the reply that was asked for could say that."""
    compiled = compile_grammar(
        read_vocabulary(byte_text().to_json(), size=258, ends=(257,)), behind.submitted[0][2].grammar
    )
    matcher = GrammarMatcher(compiled.grammar)
    return all(matcher.accept_token(token) for token in said.encode()) and bool(matcher.accept_token(257))


@pytest.mark.parametrize("parallel", [True, False])
def test_an_answer_has_its_format_and_calls_may_come_in_its_place(trials: GrammarTrials, parallel: bool) -> None:
    asked = {"tools": [STRICT, TIME], "parallel_tool_calls": parallel} | FORMAT
    behind, reply = ask(CALL, asked, trials=trials)
    (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": PARIS}
    assert fitting(behind, CALL) and fitting(behind, '{"sure": true}')
    assert fitting(behind, CALL + "\n" + CALL) == parallel
    assert not fitting(behind, '{ "sure": true}') and not fitting(behind, CALL.replace(PARIS, "{ " + PARIS[1:]))
    assert not fitting(behind, "well") and not fitting(behind, '{"sure": 1}') and not fitting(behind, "")


def test_a_call_that_has_to_be_made_needs_no_format(trials: GrammarTrials) -> None:
    behind, _ = ask("[]", {"tool_choice": "required"} | FORMAT, trials=trials)
    assert fitting(behind, '[{"name": "weather", "arguments": ' + PARIS + "}]")


def test_where_calls_have_another_form_the_answer_has_its_format(trials: GrammarTrials) -> None:
    template = TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]")
    behind, _ = ask("x", FORMAT, template, trials=trials)
    assert json.loads(behind.submitted[0][2].grammar.text) == ANSWER


def test_strict_schemas_are_refused_where_calls_have_another_form() -> None:
    _, reply = ask("x", {"tools": [STRICT]}, TEMPLATE.replace("<tool_call>", "[TOOL_CALLS]"))
    assert reply.json()["error"]["param"] == "tools[0].function.strict"


def test_without_a_choice_of_tools_nothing_is_looked_for() -> None:
    said = "<tool_call>{}</tool_call>"
    behind, reply = ask(said, {"tool_choice": "none"})
    assert reply.json()["choices"][0]["message"] == {"role": "assistant", "content": said}
    assert "<tools>" not in bytes(behind.submitted[0][1]).decode()


def test_earlier_calls_and_their_results_are_rendered() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": PARIS}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    behind, reply = ask("fine", {"messages": messages})
    assert reply.status_code == 200, reply.text
    assert "<tool_call>Paris</tool_call>[tool]sunny" in bytes(behind.submitted[0][1]).decode()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": 5}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "web"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]}, "tools[0].function.x"),
    ({"tools": [TIME, TIME]}, "tools"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools.mode"),
    ({"tool_choice": allowed("none", "time")}, "tool_choice.allowed_tools.mode"),
    ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
    ({"tool_choice": allowed("auto", "time", 5)}, "tool_choice.allowed_tools.tools[1]"),
    ({"tool_choice": allowed("auto", {"type": "function"})}, "tool_choice.allowed_tools.tools[0].function.name"),
    ({"tool_choice": allowed("auto", "time", "x")}, "tool_choice"),
    ({"tool_choice": allowed("auto", "time"), "tools": []}, "tool_choice"),
    ({"tool_choice": allowed("auto", "time") | {"x": 1}}, "tool_choice.x"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    (
        {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}],
        },
        "tools[0].function.parameters.not",
    ),
]


@pytest.mark.parametrize(("body", "param"), WRONG, ids=str)
def test_wrong_tools_are_refused_by_name(body: dict[str, Any], param: str) -> None:
    _, reply = ask("x", body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "a", "parameters": parameters}}


NAMED = {"type": "function", "function": {"name": "a"}}
NUMBERED = {"type": "object", "properties": {"a": {"type": "integer"}}}
NO_OBJECTS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "array", "items": {"type": "object"}},
    {"type": ["string", "null"]},
    {"enum": [1, "x"]},
    {"const": None},
    {"anyOf": [{"type": "string"}, {"enum": [1]}, False]},
    {"allOf": [{"oneOf": [{"type": "string"}]}]},
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "string"}}},
    {"$ref": "#"},
]


OBJECTS = [None, {}, {"description": "of any"}, NUMBERED, {"$ref": "#/$defs/n", "$defs": {"n": NUMBERED}}]


@pytest.mark.parametrize("choice", ["none", "auto", "required", NAMED], ids=str)
@pytest.mark.parametrize("parameters", NO_OBJECTS, ids=str)
def test_arguments_that_can_be_no_object_are_refused(parameters: dict[str, Any], choice: Any) -> None:
    _, reply = ask("x", {"tools": [tool(parameters)], "tool_choice": choice})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools[0].function.parameters")


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("parameters", OBJECTS, ids=str)
def test_arguments_that_can_be_objects_are_taken(trials: GrammarTrials, parameters: Any, choice: str) -> None:
    _, reply = ask('[{"name": "a"', {"tools": [tool(parameters)], "tool_choice": choice}, trials=trials)
    assert reply.status_code == 200, reply.text


MIXED: list[tuple[dict[str, Any], str]] = [
    ({"title": "any"}, '{"a": [1]}'),
    ({"anyOf": [{"type": "string"}, True]}, '{"a": [1]}'),
    (NUMBERED | {"type": ["string", "object"]}, '{"a": 1}'),
    ({"enum": ["x", {"a": 1}]}, '{"a":1}'),
    ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}], "$defs": {"n": NUMBERED}}, '{"a": 1}'),
    (
        {
            "$ref": "#/$defs/tree",
            "$defs": {
                "tree": {
                    "anyOf": [
                        {"type": "string"},
                        {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}, "up": {"$ref": "#"}}},
                    ]
                }
            },
        },
        '{"left": "x", "up": "x"}',
    ),
]


@pytest.mark.parametrize(("parameters", "arguments"), MIXED, ids=str)
def test_arguments_are_objects_whatever_else_fits(
    trials: GrammarTrials, parameters: dict[str, Any], arguments: str
) -> None:
    asked = {"tools": [tool(parameters)]}
    behind, reply = ask(arguments, asked | {"tool_choice": "required"}, trials=trials)
    assert reply.status_code == 200, reply.text
    assert fitting(behind, '[{"name": "a", "arguments": ' + arguments + "}]")
    assert not fitting(behind, '[{"name": "a", "arguments": "x"}]')
    behind, _ = ask(arguments, asked | {"tool_choice": NAMED}, trials=trials)
    assert fitting(behind, arguments) and not fitting(behind, '"x"')


def test_a_template_without_tools_refuses_them() -> None:
    _, reply = ask("x", template="{{ messages }}")
    assert reply.json()["error"]["param"] == "tools"


# --- reasoning ------------------------------------------------------------------------------------------------------

THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}{# <think> </think> #}"


def test_reasoning_is_split_off_wherever_the_reply_is_cut() -> None:
    for said in ("<think>\nhm, ok\n</think>\n\nYes <b>.", "\n<think>hm, ok</think>Yes <b>."):
        _, reply = ask(said, {"tools": []}, THINKS)
        message = reply.json()["choices"][0]["message"]
        assert message == {
            "role": "assistant",
            "content": "Yes <b>.",
            "reasoning_content": "hm, ok",
            "reasoning": "hm, ok",
        }
        _, streamed = ask(said, {"tools": [], "stream": True}, THINKS)
        chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("content", "") for delta in deltas) == "Yes <b>."
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm, ok"


def test_tokens_of_reasoning_are_counted_of_all_choices() -> None:
    said = "<think>hm</think>Yes"
    _, reply = ask(said, {"tools": [], "n": 2}, THINKS)
    usage = reply.json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * len("<think>hm</think>")}
    asked = {"tools": [], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    *_, last, _ = [line for line in ask(said, asked, THINKS)[1].text.splitlines() if line]
    assert json.loads(last[6:])["usage"] == usage
    assert "completion_tokens_details" not in ask(said, {"tools": []})[1].json()["usage"]


def test_a_reply_that_begins_within_its_reasoning() -> None:
    _, reply = ask("hm</think>Yes", {"tools": []}, THINKS + "<think>\n")
    message = reply.json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "Yes")


def test_a_reply_without_reasoning_is_all_answer() -> None:
    for said in ("Yes", " <th", "a <think>b</think>"):
        _, reply = ask(said, {"tools": []}, THINKS)
        assert reply.json()["choices"][0]["message"] == {"role": "assistant", "content": said}


def test_output_that_is_held_to_a_grammar_has_no_reasoning(trials: GrammarTrials) -> None:
    _, reply = ask("{}", {"tools": [], "response_format": {"type": "json_object"}}, THINKS + "<think>", trials=trials)
    assert reply.json()["choices"][0]["message"] == {"role": "assistant", "content": "{}"}


def test_a_plain_reply_is_read_as_it_is() -> None:
    reader = ChatReader(Reading("", None, None))
    assert [*reader.feed("<think>", last=False), *reader.feed("", last=True)] == [TextPart("<think>")]
