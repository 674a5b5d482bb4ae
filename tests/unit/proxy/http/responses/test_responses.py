"""`/v1/responses` of the application: what becomes of its input, how its answer is worded, and what is kept of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from aegis.core.request import FinishReason
from aegis.engine.grammar.trials import GrammarTrials
from proxy.http.app import create_app
from proxy.http.market import Delta, Failed, Finished, Reused
from tests.event_laws import check_responses, events_of
from tests.long_forms import first_of
from tests.unit.proxy.http.scripted import EOS, TEXTS, byte_text, calling, keyring, market, post, says, tokens

PATH = "/v1/responses"
TEMPLATE = (
    "{{ tools }}<tool_call><think></think>{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls %}({{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}"
)
TOOL = {"type": "function", "name": "f", "description": "of x", "parameters": {"type": "object"}, "strict": True}
CALLED = '<think>hm</think>so <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def trials() -> Iterator[GrammarTrials]:
    opened = GrammarTrials()
    yield opened
    opened.close()


def ask(content: Any = "hi", **parameters: Any) -> dict[str, Any]:
    return {"model": "m", "input": content} | parameters


def id_of_request(request_id: str) -> str:
    """As `responses.py` makes it, of a caller without a key."""
    return str(post(market(), PATH, ask(), headers={"x-request-id": request_id}).json()["id"])


def prompt_of(behind: Any) -> str:
    return bytes(token for token in behind.submitted[-1][1] if token < 256).decode()


def test_a_plain_answer_has_openai_s_form() -> None:
    behind = market(says([*b"hello", EOS]))
    told = post(behind, PATH, ask(instructions="be", metadata={"a": "b"}), headers={"x-request-id": "r"}).json()
    (item,) = told.pop("output")
    assert item.pop("id").startswith("msg_")
    text = {"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}
    assert item == {"type": "message", "role": "assistant", "status": "completed", "content": [text]}
    assert told.pop("id").startswith("resp_")
    assert told.pop("completed_at") >= told.pop("created_at") > 0
    assert told == {
        "object": "response",
        "model": "m",
        "status": "completed",
        "usage": {
            "input_tokens": 29,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 6,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 35,
        },
        "error": None,
        "incomplete_details": None,
        "instructions": "be",
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
        "background": False,
    }
    assert prompt_of(behind) == "[system]be[user]hi[assistant]"
    assert behind.answers == [("/v1/responses", 200)]


def test_a_stream_is_the_whole_answer_by_named_events() -> None:
    events = events_of(post(market(says("ab")), PATH, ask(stream=True)).text)
    check_responses(events)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]


@pytest.mark.parametrize("per_delivery", first_of(1, [7, 1, 1000]))
def test_reasoning_text_and_calls_are_items_of_the_same_ids_streamed_or_not(per_delivery: int) -> None:
    behind = market(says(CALLED, per_delivery=per_delivery), text=byte_text(TEMPLATE))
    same = {"x-request-id": "r"}
    whole = post(behind, PATH, ask(tools=[TOOL]), headers=same).json()
    thought, message, call = whole["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "hm"}])
    assert message["content"][0]["text"].strip() == "so"
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", "f", {"a": 1})
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == len("<think>hm</think>")
    events = events_of(post(behind, PATH, ask(tools=[TOOL], stream=True), headers=same).text)
    check_responses(events)
    last = events[-1]["response"]
    times = ("created_at", "completed_at")
    assert {**last, **dict.fromkeys(times)} == {**whole, **dict.fromkeys(times)}


def test_tokens_that_were_kept_from_before_are_told_apart() -> None:
    def script(prompt: Any, sampling: Any) -> list[Any]:
        return [Reused(8), Delta(tokens("x")), Finished(FinishReason.STOP)]

    usage = post(market(script), PATH, ask()).json()["usage"]
    assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (19, 8)


def test_items_reach_the_template_as_turns() -> None:
    behind = market(says("x"), text=byte_text(TEMPLATE))
    items = [
        {"type": "message", "role": "developer", "content": "be"},
        {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm "}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": '{"a": '},
        {"type": "function_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "no"}]},
        {"type": "web_search_call", "id": "w"},
        {"role": "developer", "content": "now"},
        {"role": "user", "content": "go"},
    ]
    reply = post(behind, PATH, ask(items, instructions="first"))
    assert reply.status_code == 200, reply.text
    said = '[system]first\nbe[user]one\ntwo[assistant]hm so(c1 f {"a": 1})(c2 f {})[tool]donec1[tool]noc2'
    assert prompt_of(behind).endswith(said + "[system]now[user]go")
    assert reply.headers["x-aegis-ignored"] == "input[5].arguments (no JSON object), input[8] (web_search_call)"


def test_answers_that_follow_each_other_remain_apart() -> None:
    behind = market(text=byte_text(TEMPLATE))
    items = [
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "go"},
    ]
    assert post(behind, PATH, ask(items)).status_code == 200
    assert prompt_of(behind).endswith("[assistant]one[assistant]two[assistant]hmthree[user]go")


@pytest.mark.parametrize("per_delivery", first_of(1, [7, 1, 1000]))
@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("hello", "hello"),
        (CALLED, "so"),
        ("<think>hm</think>a <b and <tool", "a <b and <tool"),
        ("<<b <tool_call>} c", "<<b <tool_call>} c"),
    ],
)
def test_the_tokens_of_text_have_logprobs(said: str, text: str, per_delivery: int) -> None:
    behind = market(says([*said.encode(), EOS], per_delivery=per_delivery), text=byte_text(TEMPLATE))
    body = ask(include=["message.output_text.logprobs"], top_logprobs=1, tools=[TOOL | {"strict": False}])
    whole = post(behind, PATH, body).json()
    assert whole["top_logprobs"] == 1 and behind.submitted[0][2].logprobs == 1
    (content,) = [item["content"][0] for item in whole["output"] if item["type"] == "message"]
    assert [each["token"] for each in content["logprobs"]] == list(text) == list(content["text"])
    assert all(each["logprob"] < 0 and each["top_logprobs"] for each in content["logprobs"])
    events = events_of(post(behind, PATH, body | {"stream": True}).text)
    check_responses(events)
    assert content in [item["content"][0] for item in events[-1]["response"]["output"] if "content" in item]


def test_all_tokens_of_a_character_have_logprobs() -> None:
    behind = market(says([*"aé🦊".encode(), EOS]), text=byte_text(TEMPLATE))
    whole = post(behind, PATH, ask(include=["message.output_text.logprobs"])).json()
    (content,) = [item["content"][0] for item in whole["output"]]
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    (choice,) = post(behind, "/v1/chat/completions", chat).json()["choices"]
    *told, end = choice["logprobs"]["content"]
    assert content["logprobs"] == told and len(told) == len("aé🦊".encode()) and end["token"] == "</s>"


def test_more_logprobs_than_there_are_are_refused() -> None:
    reply = post(market(says("x")), PATH, ask(top_logprobs=21))
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "top_logprobs"


@pytest.mark.long
def test_tools_of_other_types_are_ignored_and_told_of() -> None:
    behind = market(says("x"), text=byte_text(TEMPLATE))
    tools = [{"type": "web_search"}, TOOL, {"type": "local_shell"}, {"type": "custom", "name": "patch"}]
    reply = post(behind, PATH, ask(tools=tools, include=["reasoning.encrypted_content"]))
    assert reply.status_code == 200
    assert reply.json()["tools"] == tools
    ignored = "tools[0] (web_search), tools[2] (local_shell), tools[3] (custom), include (reasoning.encrypted_content)"
    assert reply.headers["x-aegis-ignored"] == ignored
    only = post(market(), PATH, ask(tools=tools[:1], tool_choice={"type": "web_search"}))
    assert only.status_code == 200


@pytest.mark.long
def test_strict_schemas_are_not_demanded_where_the_model_cannot_be_held_to_them(trials: GrammarTrials) -> None:
    """Clients always send it; it is kept to in the form of Hermes, and where a call is demanded."""
    listed = byte_text('{{ tools }}"parameters"{{ messages }}')
    reply = post(market(text=listed), PATH, ask(tools=[{"type": "web_search"}, TOOL]), trials)
    assert (reply.status_code, reply.headers["x-aegis-ignored"]) == (200, "tools[0] (web_search), tools[1].strict")
    behind = market(says("x"), text=byte_text(TEMPLATE))
    assert "x-aegis-ignored" not in post(behind, PATH, ask(tools=[TOOL]), trials).headers
    grammar = behind.submitted[0][2].grammar
    assert grammar and grammar.kind == "structural_tag"


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("required", '[{"name": "f", "arguments": {"a": 1}}]'),
        ({"type": "function", "name": "f"}, '{"a": 1}'),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}, ""),
    ],
)
def test_a_call_that_is_demanded_is_held_to_its_schema(trials: GrammarTrials, choice: Any, said: str) -> None:
    behind = market(says(said or '[{"name": "f", "arguments": {"a": 1}}]'), text=byte_text(TEMPLATE))
    told = post(behind, PATH, ask(tools=[TOOL, TOOL | {"name": "g"}], tool_choice=choice), trials).json()
    assert [(item["name"], json.loads(item["arguments"])) for item in told["output"]] == [("f", {"a": 1})]
    assert behind.submitted[-1][2].grammar is not None
    assert ("'g'" in prompt_of(behind)) == (not isinstance(choice, dict) or choice["type"] == "function")


def test_a_tool_that_is_allowed_and_not_there_is_refused() -> None:
    choice = {"type": "allowed_tools", "tools": [{"type": "web_search"}, {"type": "function", "name": "x"}]}
    reply = post(market(text=byte_text(TEMPLATE)), PATH, ask(tools=[TOOL], tool_choice=choice))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "tool_choice.tools") and "'x'" in error["message"]


def test_output_is_held_to_a_schema(trials: GrammarTrials) -> None:
    behind = market(says('{"a": 1}'))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    assert post(behind, PATH, ask(text={"format": wanted}), trials).status_code == 200
    grammar = behind.submitted[-1][2].grammar
    assert grammar and json.loads(grammar.text) == schema
    error = post(behind, PATH, ask(text={"format": wanted | {"schema": {"not": {}}}}), trials).json()["error"]
    assert error["param"].startswith("text.format.schema") and "'text.format.schema" in error["message"]


def test_a_format_is_read_as_in_chat(trials: GrammarTrials) -> None:
    behind = market(says("x"))
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
    assert post(behind, PATH, ask(text={"format": tag}), trials).status_code == 200
    assert behind.submitted[0][2].grammar.kind == "structural_tag"
    schema = {"name": "n", "schema": {"type": "object"}, "description": None}
    assert post(behind, PATH, ask(text={"format": {"type": "json_schema"} | schema}), trials).status_code == 200
    for wrong in ({"type": "json_object", "schema": {}}, {"type": "json_schema", "size": 5} | schema):
        error = post(behind, PATH, ask(text={"format": wrong}), trials).json()["error"]
        assert error["code"] == "unknown_parameter" and error["param"] in ("text.format.schema", "text.format.size")


@pytest.mark.parametrize(("schema", "choice"), [({"not": {}}, "required"), ({"type": "string"}, "auto")], ids=str)
def test_a_wrong_schema_is_refused_by_its_place_here(schema: dict[str, Any], choice: str) -> None:
    tools = [{"type": "web_search"}, TOOL | {"parameters": schema}]
    reply = post(market(text=byte_text(TEMPLATE)), PATH, ask(tools=tools, tool_choice=choice))
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith("tools[1].parameters"), reply.text


def test_an_answer_that_is_cut_off_is_incomplete() -> None:
    for stream in (False, True):
        behind = market(says("abc", reason=FinishReason.LENGTH))
        reply = post(behind, PATH, ask(max_output_tokens=3, stream=stream))
        if stream:
            events = events_of(reply.text)
            check_responses(events)
        told = events[-1]["response"] if stream else reply.json()
        assert (told["status"], told["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert told["output"][0]["status"] == "incomplete"
        assert behind.submitted[0][2].max_tokens == 3


def test_a_stream_that_fails_says_so_last() -> None:
    def script(prompt: Any, sampling: Any) -> list[Any]:
        return [Delta(tokens("a")), Failed("broke")]

    events = events_of(post(market(script), PATH, ask(stream=True)).text)
    check_responses(events)
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "broke"}
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


def test_a_conversation_goes_on_from_a_response_and_its_instructions_do_not() -> None:
    behind = market(says(CALLED), text=byte_text(TEMPLATE))

    async def talk(client: httpx.AsyncClient) -> list[dict[str, Any]]:
        first = (await client.post(PATH, json=ask("one", tools=[TOOL], instructions="be"))).json()
        call = first["output"][-1]["call_id"]
        output = {"type": "function_call_output", "call_id": call, "output": "done"}
        second = await client.post(PATH, json=ask([output], previous_response_id=first["id"], stream=True))
        assert prompt_of(behind).endswith(f'[user]one[assistant]hmso({call} f {{"a": 1}})[tool]done{call}')
        told = events_of(second.text)[-1]["response"]
        third = await client.post(PATH, json=ask("two", previous_response_id=told["id"], store=False))
        assert third.status_code == 200 and prompt_of(behind).count("[assistant]hmso") == 2
        assert (await client.get(f"{PATH}/{first['id']}")).json() == first
        assert (await client.get(f"{PATH}/{told['id']}", params={"stream": "false"})).json() == told
        again = await client.get(f"{PATH}/{told['id']}", params={"stream": "true", "starting_after": "1"})
        assert (again.status_code, again.json()["error"]["param"]) == (400, "stream")
        gone = await client.post(PATH, json=ask("x", previous_response_id=third.json()["id"]))
        assert (gone.status_code, gone.json()["error"]["code"]) == (400, "previous_response_not_found")
        deleted = await client.delete(f"{PATH}/{first['id']}")
        assert deleted.json() == {"id": first["id"], "object": "response", "deleted": True}
        return [
            (await client.request(method, f"{PATH}/{first['id']}{path}")).json()["error"]
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"))
        ]

    assert {error["code"] for error in calling(behind, talk)} == {"response_not_found"}


def test_a_conversation_that_takes_long_to_read_again_is_not_kept() -> None:
    """Each of its requests is within the bounds of bodies; together they are not."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps({"a": [""] * 40_000})}

    async def talk(client: httpx.AsyncClient) -> list[int]:
        first = (await client.post(PATH, json=ask([call, {"role": "user", "content": "x"}]))).json()["id"]
        again = ask([call, {"role": "user", "content": "x"}], previous_response_id=first)
        second = (await client.post(PATH, json=again)).json()["id"]
        return [(await client.get(f"{PATH}/{each}")).status_code for each in (first, second)]

    assert calling(market(), talk) == [200, 404]


def test_nobody_sees_the_responses_of_others() -> None:
    behind = market()

    async def talk(client: httpx.AsyncClient) -> int:
        alice, bob = ({"authorization": f"Bearer {name}"} for name in ("a", "b"))
        first = (await client.post(PATH, json=ask(), headers=alice)).json()
        assert (await client.get(f"{PATH}/{first['id']}", headers=alice)).status_code == 200
        return (await client.get(f"{PATH}/{first['id']}", headers=bob)).status_code

    assert calling(behind, talk, keys=keyring(alice="a", bob="b")) == 404


def test_what_a_response_answers_is_listed() -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'}
    asked = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "so"},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
    ]

    async def talk(client: httpx.AsyncClient) -> Any:
        first = (await client.post(PATH, json=ask(asked))).json()
        second = (await client.post(PATH, json=ask("more", previous_response_id=first["id"]))).json()
        place = f"{PATH}/{second['id']}/input_items"
        whole = (await client.get(place, params={"order": "asc"})).json()
        pages, after = list[Any](), {}
        while not pages or pages[-1]["has_more"]:
            pages.append((await client.get(place, params={"limit": 3} | after)).json())
            after = {"after": pages[-1]["last_id"]}
        again = (await client.post(PATH, json=ask([*whole["data"]]))).json()
        limits = [{"limit": limit} for limit in ("0", "1" * 5000, "0099" + "9" * 5000, "x")]
        for wrong in (*limits, {"order": "up"}, {"after": "none"}):
            refused = await client.get(place, params=wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, *wrong)
        return whole, pages, (second["usage"], again["usage"])

    behind = market(says([*b"well", EOS]), text=byte_text(TEMPLATE))
    whole, pages, usages = calling(behind, talk)
    items = [{name: value for name, value in item.items() if name not in ("id", "status")} for item in whole["data"]]
    said = {"type": "output_text", "annotations": []}
    assert items == [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        asked[1],
        {"type": "message", "role": "assistant", "content": [said | {"text": "so"}]},
        *asked[3:],
        {"type": "message", "role": "assistant", "content": [said | {"text": "well"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "more"}]},
    ]
    assert [len(page["data"]) for page in pages] == [3, 3, 1]
    assert [item for page in pages for item in page["data"]] == whole["data"][::-1]
    assert whole["first_id"] == pages[-1]["last_id"] and whole["last_id"] == pages[0]["first_id"]
    assert usages[0] == usages[1]


def test_a_server_that_keeps_no_responses_says_so() -> None:
    async def talk(client: httpx.AsyncClient) -> tuple[bool, int]:
        told = (await client.post(PATH, json=ask())).json()
        return told["store"], (await client.get(f"{PATH}/{told['id']}")).status_code

    assert calling(market(), talk, responses_ttl_s=0.0) == (False, 404)


def stalled(prompt: Any, sampling: Any) -> list[Any]:
    """Two tokens, and nothing more until it is cancelled."""
    return [Delta(tokens("ab")), asyncio.Event().wait(), Finished(FinishReason.STOP)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_running_response_is_cancelled_from_elsewhere(stream: bool) -> None:
    behind, response_id = market(stalled), id_of_request("r")

    async def talk(client: httpx.AsyncClient) -> Any:
        asked = asyncio.create_task(client.post(PATH, json=ask(stream=stream), headers={"x-request-id": "r"}))
        while not behind.handles:
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        ended = await client.post(f"{PATH}/{response_id}/cancel")
        reply = await asked
        again = await client.post(f"{PATH}/{response_id}/cancel")
        assert (again.status_code, again.json()) == (200, ended.json())
        return ended.json(), reply

    ended, reply = calling(behind, talk)
    assert ended["status"] == "cancelled" and ended["output"][0]["content"][0]["text"] == "ab"
    assert behind.handles[0].cancelled
    if stream:
        events = events_of(reply.text)
        check_responses(events)
    assert (events[-1]["response"] if stream else reply.json()) == ended


def test_nothing_is_left_out_of_a_stream_that_is_cancelled_while_its_client_reads_nothing() -> None:
    def script(prompt: Any, sampling: Any) -> list[Any]:
        return [Delta(tokens("ab")), Delta(tokens("cd")), asyncio.Event().wait(), Finished(FinishReason.STOP)]

    behind, response_id = market(script), id_of_request("r")
    app = create_app(behind, texts=TEXTS)
    head = {"type": "http", "http_version": "1.1", "method": "POST", "path": PATH, "raw_path": PATH.encode()}
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"x-request-id", b"r")]
    scope = head | {"query_string": b"", "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}

    async def run() -> tuple[str, Any]:
        reads, blocked, stream = asyncio.Event(), asyncio.Event(), list[bytes]()
        bodies = iter([{"type": "http.request", "body": json.dumps(ask(stream=True)).encode(), "more_body": False}])

        async def receive() -> Any:
            return next(bodies, None) or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if b'"cd"' in message.get("body", b""):
                blocked.set()
                await reads.wait()
            stream.append(message.get("body", b""))

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
            streaming = asyncio.create_task(app(scope, receive, send))
            await blocked.wait()
            cancelled = await client.post(f"{PATH}/{response_id}/cancel")
            reads.set()
            await streaming
        return b"".join(stream).decode(), cancelled.json()

    stream, cancelled = asyncio.run(asyncio.wait_for(run(), 20))
    events = events_of(stream)
    check_responses(events)
    assert events[-1]["response"] == cancelled and cancelled["output"][0]["content"][0]["text"] == "abcd"


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "input_image", "image_url": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "input_file", "file_id": "x"}]}, "input[1]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"conversation": "x"}, "conversation"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"temperature": 5}, "temperature"),
        ({"include": "message.output_text.logprobs"}, "include"),
        ({"include": ["unheard-of", 5]}, "include[1]"),
        ({"include": ["x"] * 65}, "include"),
        ({"metadata": ["a"]}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"stream_options": ["x"]}, "stream_options"),
        ({"maxtokens": 5}, "maxtokens"),
        ({"input": "x" * 600}, "input"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
    ],
)
def test_bad_input_is_refused_by_its_name_here(parameters: dict[str, Any], param: str) -> None:
    reply = post(market(), PATH, ask(**parameters))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_an_image_is_refused_wherever_it_is_with_what_is_read() -> None:
    image = {"type": "input_image", "image_url": "x"}
    alone, within = (post(market(), PATH, ask([each])) for each in (image, {"role": "user", "content": [image]}))
    assert alone.json()["error"]["message"] == (
        "'input[0]' must be a message of text, not 'input_image': the models here read text only"
    )
    assert within.json()["error"]["message"].endswith("not 'input_image': the models here read text only")


def test_input_without_a_message_names_what_was_passed_over() -> None:
    reply = post(market(), PATH, ask([{"type": "wat"}, {"type": "web\nsearch"}]))
    assert (reply.status_code, reply.json()["error"]["message"]) == (
        400,
        "'input' must hold at least one message; these items are not known here and were passed over: "
        "input[0] (wat), input[1] (web?search)",
    )
    assert len(post(market(), PATH, ask([{"type": "w" * 9000}])).json()["error"]["message"]) < 400
    assert post(market(), PATH, ask([])).json()["error"]["message"] == "'input' must hold at least one message"


def test_what_else_text_and_reasoning_ask_for_is_ignored_with_a_note() -> None:
    asked = ask(reasoning={"effort": "low", "summary": "auto"}, text={"verbosity": "low", "format": None})
    reply = post(market(), PATH, asked)
    assert (reply.status_code, reply.headers["x-aegis-ignored"]) == (200, "reasoning.summary, text.verbosity")
    error = post(market(), PATH, ask(reasoning={"effort": "hardly"})).json()["error"]
    assert (error["param"], "hardly" in error["message"]) == ("reasoning.effort", True)


def test_a_choice_among_tools_of_which_none_is_known_is_ignored_with_a_note() -> None:
    reply = post(market(), PATH, ask(tools=[{"type": "web_search"}], tool_choice="required"))
    assert (reply.status_code, reply.headers["x-aegis-ignored"]) == (200, "tools[0] (web_search), tool_choice")
    assert "x-aegis-ignored" not in post(market(), PATH, ask(tool_choice="auto")).headers


def test_as_many_pairs_and_entries_as_openai_takes_are_taken() -> None:
    pairs = {str(number): "x" for number in range(16)}
    reply = post(market(), PATH, ask(metadata=pairs, include=["unheard-of"]))
    assert (reply.status_code, reply.json()["metadata"]) == (200, pairs), reply.text
    assert reply.headers["x-aegis-ignored"] == "include (unheard-of)"
    assert post(market(), PATH, ask(metadata=None, include=None)).status_code == 200
