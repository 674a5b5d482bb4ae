"""The unmodified `anthropic` Python client, synchronous and asynchronous: tools, structured output, streams, counts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import pytest
from pydantic import BaseModel

from tests.event_laws import check_messages, events_of
from tests.live.server import Server
from tests.long_forms import first_of

MESSAGES: Any = [{"role": "user", "content": "the cat sat"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
}
TOOL: Any = {"name": "weather", "description": "of a place", "input_schema": SCHEMA}
NAMED: Any = {"type": "tool", "name": "weather"}
GREEDY: Any = {"extra_body": {"temperature": 0}}


class Answer(BaseModel):
    kind: Literal["cat", "hat"]
    sure: bool


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as opened:
        yield opened


def texts(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@pytest.mark.parametrize("model", first_of(1, ["llama", "qwen3", "mistral"]))
def test_a_stream_is_the_whole_answer(client: anthropic.Anthropic, model: str) -> None:
    body: Any = {"model": model, "messages": MESSAGES, "system": "be", "max_tokens": 12} | GREEDY
    whole = client.messages.create(**body)
    with client.messages.stream(**body) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert said == texts(final) == texts(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == whole.stop_reason and final.stop_reason in ("end_turn", "max_tokens")


def test_a_tool_is_called_and_gives_back(client: anthropic.Anthropic) -> None:
    body: Any = {"model": "llama", "max_tokens": 60, "tools": [TOOL]}
    with client.messages.stream(messages=MESSAGES, tool_choice=NAMED, **body) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    (call,) = final.content
    assert final.stop_reason == "tool_use" and call.type == "tool_use"
    assert "input_json" in kinds
    given: Any = call.input
    assert given["unit"] in ("C", "F") and 1 <= given["days"] <= 9
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "warm"}
    history: Any = [*MESSAGES, {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    again = client.messages.create(messages=history, model="llama", max_tokens=4)
    assert again.stop_reason in ("end_turn", "max_tokens")


def test_structured_output_is_parsed(client: anthropic.Anthropic) -> None:
    parsed = client.messages.parse(model="mistral", messages=MESSAGES, max_tokens=60, output_format=Answer)
    assert isinstance(parsed.parsed_output, Answer)


def test_a_stop_sequence_is_told(client: anthropic.Anthropic) -> None:
    body: Any = {"model": "llama", "messages": MESSAGES, "max_tokens": 20} | GREEDY
    said = texts(client.messages.create(**body))
    stop = said.strip()[2:5]
    stopped = client.messages.create(stop_sequences=[stop], **body)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert texts(stopped) == said[: said.index(stop)]


def test_tokens_are_counted_as_they_are_prompted(client: anthropic.Anthropic) -> None:
    body: Any = {"model": "qwen3", "messages": MESSAGES, "system": [{"type": "text", "text": "be"}]}
    counted = client.messages.count_tokens(**body).input_tokens
    usage = client.messages.create(max_tokens=1, **body).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_the_asynchronous_client_and_betas(server: Server) -> None:
    async def main() -> None:
        async with anthropic.AsyncAnthropic(base_url=server.url, auth_token="none", max_retries=0) as opened:
            body: Any = {"model": "granite", "messages": MESSAGES, "max_tokens": 8} | GREEDY
            whole = await opened.beta.messages.create(betas=["new-2027-01-01"], **body)
            async with opened.messages.stream(**body) as stream:
                assert await stream.get_final_text() == texts(whole)

    asyncio.run(main())


def test_errors_are_the_client_s_own(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as unknown:
        client.messages.create(model="none", messages=MESSAGES, max_tokens=1)
    assert "there is no model 'none'" in str(unknown.value)
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(model="llama", messages=[], max_tokens=1)
    assert "'messages'" in str(wrong.value) and wrong.value.request_id


@pytest.mark.parametrize("seed", first_of(2, range(6)))
def test_every_stream_keeps_the_laws(server: Server, seed: int) -> None:
    model = ("llama", "qwen3", "mistral", "granite", "phi3", "gemma2")[seed]
    body = {"model": model, "messages": MESSAGES, "max_tokens": 30, "stream": True, "seed": seed}
    more: list[dict[str, Any]] = [
        {},
        {"stop_sequences": ["e", "a"]},
        {"tools": [TOOL], "tool_choice": {"type": "any"}},
        {"tools": [TOOL], "max_tokens": 3, "tool_choice": NAMED},
    ]
    for parameters in more:
        reply = httpx.post(f"{server.url}/v1/messages", json=body | parameters, timeout=120, trust_env=False)
        assert reply.status_code == 200, reply.text
        check_messages(events_of(reply.text))
