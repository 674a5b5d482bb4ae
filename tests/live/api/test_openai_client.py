"""The unmodified `openai` Python client, synchronous and asynchronous: tools, structured output, logprobs, streams."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.live.server import Server

MESSAGES: Any = [{"role": "user", "content": "the cat sat"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a place",
            "parameters": {
                "type": "object",
                "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
                "required": ["unit", "days"],
            },
        },
    },
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


class Answer(BaseModel):
    kind: Literal["cat", "hat"]
    sure: bool


def check_call(name: str, arguments: str) -> None:
    given = json.loads(arguments)
    if name == "weather":
        assert given["unit"] in ("C", "F") and 1 <= given["days"] <= 9
    else:
        assert (name, given) == ("time", {})


@pytest.mark.parametrize("seed", range(4))
def test_a_required_tool_is_called(client: openai.OpenAI, seed: int) -> None:
    reply = client.chat.completions.create(
        model="qwen3", messages=MESSAGES, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed
    )
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls and len(choice.message.tool_calls) == 1
    call: Any = choice.message.tool_calls[0]
    check_call(call.function.name, call.function.arguments)
    history: Any = [*MESSAGES, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    again = client.chat.completions.create(model="qwen3", messages=history, tools=TOOLS, max_tokens=5)
    assert again.choices[0].finish_reason in ("stop", "length")


def test_a_named_tool_is_streamed(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="llama", messages=MESSAGES, tools=TOOLS, tool_choice=NAMED, seed=1
    ) as got:
        kinds = {event.type for event in got}
        final = got.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    (call,) = final.choices[0].message.tool_calls or []
    check_call(call.function.name, call.function.arguments)


def test_structured_output_is_parsed(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model="mistral", messages=MESSAGES, response_format=Answer, seed=1)
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    with client.chat.completions.stream(model="mistral", messages=MESSAGES, response_format=Answer, seed=1) as got:
        for _ in got:
            pass
        assert got.get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed


def test_streams_of_the_asynchronous_client_are_its_whole_replies(server: Server) -> None:
    body: Any = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    models = ["llama", "qwen3", "granite"]

    async def one(opened: openai.AsyncOpenAI, model: str) -> None:
        whole = (await opened.chat.completions.create(model=model, **body)).choices[0]
        text, tokens, usage = "", [], None
        stream: Any = await opened.chat.completions.create(
            model=model, stream=True, stream_options={"include_usage": True}, **body
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                tokens += choice.logprobs.content if choice.logprobs else []
        assert text == whole.message.content
        assert whole.logprobs and [token.token for token in tokens] == [
            each.token for each in whole.logprobs.content or []
        ]
        assert all(len(token.top_logprobs) == 2 for token in tokens)
        assert usage and usage.completion_tokens == len(tokens)

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
            await asyncio.gather(*(one(opened, model) for model in models))

    asyncio.run(main())


def test_batches_of_prompts_as_text_and_as_token_ids(client: openai.OpenAI) -> None:
    body: Any = {"model": "phi3", "max_tokens": 6, "temperature": 0}
    texts = ["the cat", "the hat and the cat"]
    batch = client.completions.create(prompt=texts, n=2, **body)
    assert [choice.index for choice in batch.choices] == [0, 1, 2, 3]
    for at, text in enumerate(texts):
        alone = client.completions.create(prompt=text, **body)
        assert {choice.text for choice in batch.choices[2 * at : 2 * at + 2]} == {alone.choices[0].text}
    by_ids = client.completions.create(prompt=[[5, 6], [7]], **body)
    assert len(by_ids.choices) == 2
    assert by_ids.usage and by_ids.usage.prompt_tokens == 3


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"stop": [""]}, "stop"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ],
)
def test_what_is_not_served_is_refused_by_name(client: openai.OpenAI, parameters: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="llama", messages=MESSAGES, extra_body=parameters)
    assert refused.value.param == param
