"""`/v1/responses` by the unmodified `openai` Python client: streams, tools, structured output, conversations."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.event_laws import check_responses, events_of
from tests.live.server import Server, eventually
from tests.long_forms import first_of

SCHEMA: Any = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "name": "weather", "description": "of a place", "parameters": SCHEMA, "strict": True}
NAMED: Any = {"type": "function", "name": "weather"}


class Answer(BaseModel):
    kind: Literal["cat", "hat"]
    sure: bool


@pytest.mark.parametrize("model", first_of(1, ["llama", "qwen3", "mistral"]))
def test_a_stream_is_the_whole_answer(client: openai.OpenAI, model: str) -> None:
    body: Any = {"model": model, "input": "the cat sat", "instructions": "be", "max_output_tokens": 12}
    body |= {"temperature": 0}
    whole = client.responses.create(**body)
    with client.responses.stream(**body) as stream:
        said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert said == whole.output_text
    assert whole.usage and whole.usage.output_tokens <= 12
    assert whole.status in ("completed", "incomplete")


def test_a_tool_is_called_and_its_output_goes_on_from_the_response(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="llama", input="the cat sat", tools=[TOOL], tool_choice=NAMED, max_output_tokens=60
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    (call,) = final.output
    assert call.type == "function_call"
    given = json.loads(call.arguments)
    assert given["unit"] in ("C", "F") and 1 <= given["days"] <= 9
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "warm"}]
    again = client.responses.create(
        model="llama", input=output, previous_response_id=final.id, max_output_tokens=4, temperature=0
    )
    history: Any = [{"role": "user", "content": "the cat sat"}, *(item.to_dict() for item in final.output), *output]
    alone = client.responses.create(model="llama", input=history, max_output_tokens=4, temperature=0)
    assert again.output_text == alone.output_text
    assert again.usage and alone.usage and again.usage.input_tokens == alone.usage.input_tokens


def test_structured_output_is_parsed(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model="mistral", input="the cat sat", text_format=Answer, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, Answer)
    with client.responses.stream(
        model="mistral", input="the cat sat", text_format=Answer, max_output_tokens=60
    ) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Answer)


def test_a_response_is_seen_again_until_it_is_deleted(client: openai.OpenAI) -> None:
    first = client.responses.create(model="phi3", input="the cat", max_output_tokens=4)
    assert client.responses.retrieve(first.id).to_dict() == first.to_dict()
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as gone:
        client.responses.create(model="phi3", input="x", previous_response_id=first.id)
    assert gone.value.code == "previous_response_not_found"


def test_the_tokens_of_text_have_logprobs_and_what_was_asked_is_listed(client: openai.OpenAI) -> None:
    body: Any = {"model": "llama", "input": "the cat", "max_output_tokens": 6, "temperature": 0, "top_logprobs": 2}
    told = client.responses.create(include=["message.output_text.logprobs"], **body)
    content: Any = told.output[0].content[0]  # type: ignore[union-attr, index]
    assert content.logprobs and all(len(each.top_logprobs) == 2 for each in content.logprobs)
    (asked,) = client.responses.input_items.list(told.id)
    assert asked.to_dict()["content"] == [{"type": "input_text", "text": "the cat"}]


def test_a_stream_is_cancelled_from_another_connection(client: openai.OpenAI) -> None:
    body: Any = {"extra_body": {"seed": 1}, "stream": True}
    stream = client.responses.create(model="llama", input="the cat sat", **body)
    begun: Any = next(iter(stream))
    try:
        ended = client.responses.cancel(begun.response.id)
    except openai.BadRequestError as error:  # it was faster
        assert error.code == "response_ended"
        return
    last: Any = list(stream)[-1]
    assert last.response.status == ended.status and ended.status in ("cancelled", "completed", "incomplete")


def test_a_response_in_the_background_is_found_when_it_has_ended(client: openai.OpenAI) -> None:
    body: Any = {"model": "llama", "input": "the cat", "max_output_tokens": 8, "temperature": 0}
    whole = client.responses.create(**body)
    begun = client.responses.create(background=True, **body)

    def ended() -> Any:
        told = client.responses.retrieve(begun.id)
        return told if told.status != "in_progress" else None

    assert eventually(ended, "it has ended").output_text == whole.output_text


def test_the_asynchronous_client(server: Server) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
            body: Any = {"model": "granite", "input": "the cat", "max_output_tokens": 8, "temperature": 0}
            whole = await opened.responses.create(store=False, **body)
            stream = await opened.responses.create(stream=True, **body)
            last: Any = [event async for event in stream][-1]
            assert last.response.output[0].content[0].text == whole.output_text

    asyncio.run(main())


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"conversation": "x"}, "conversation"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
    ],
)
def test_what_is_not_served_is_refused_by_name(client: openai.OpenAI, parameters: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="llama", input="x", extra_body=parameters)
    assert refused.value.param == param


def test_a_retry_gets_the_same_items(server: Server) -> None:
    def asked(stream: bool) -> dict[str, Any]:
        body = {"model": "llama", "input": "the cat", "max_output_tokens": 9, "stream": stream}
        headers = {"x-request-id": "retried-response"}
        reply = httpx.post(f"{server.url}/v1/responses", json=body, headers=headers, timeout=120, trust_env=False)
        told = events_of(reply.text)[-1]["response"] if stream else reply.json()
        return {name: told[name] for name in ("id", "output", "usage")}

    assert asked(True) == asked(False) == asked(True)


@pytest.mark.parametrize("seed", first_of(2, range(6)))
def test_every_stream_keeps_the_laws(server: Server, seed: int) -> None:
    model = ("llama", "qwen3", "mistral", "granite", "phi3", "gemma2")[seed]
    body = {"model": model, "input": "the cat sat", "max_output_tokens": 30, "stream": True, "seed": seed}
    more: list[dict[str, Any]] = [
        {},
        {"store": False, "temperature": 2},
        {"tools": [TOOL, {"type": "web_search"}], "tool_choice": "required"},
        {"tools": [TOOL], "max_output_tokens": 3, "tool_choice": NAMED},
    ]
    for parameters in more:
        reply = httpx.post(f"{server.url}/v1/responses", json=body | parameters, timeout=120, trust_env=False)
        assert reply.status_code == 200, reply.text
        check_responses(events_of(reply.text))
