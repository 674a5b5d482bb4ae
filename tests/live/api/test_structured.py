"""Structured output from the whole server, through the unmodified `openai` client."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import openai
import pytest

from bench.lab.random_schemas import random_schema
from tests.json_schemas import satisfies
from tests.live.server import Server

SCHEMAS = 40


def asked(seed: int) -> dict[str, Any]:
    schema = random_schema(random.Random(seed), depth=1)
    return {"type": "json_schema", "json_schema": {"name": f"s{seed}", "schema": schema}}


def test_every_answer_satisfies_its_schema_whatever_runs_beside_it(server: Server) -> None:
    models = ["llama", "qwen3", "mistral"]

    async def main() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
            calls = [
                opened.chat.completions.create(
                    model=models[seed % 3],
                    messages=[{"role": "user", "content": f"the cat {seed}"}],
                    response_format=asked(seed),  # type: ignore[arg-type]
                    seed=seed,
                    temperature=1.5,
                )
                for seed in range(SCHEMAS)
            ]
            return await asyncio.gather(*calls)

    whole = 0
    for seed, reply in enumerate(asyncio.run(main())):
        choice = reply.choices[0]
        if choice.finish_reason == "stop":
            whole += 1
            schema = asked(seed)["json_schema"]["schema"]
            assert satisfies(json.loads(choice.message.content), schema), (schema, choice.message.content)
        else:
            assert choice.finish_reason == "length"
    assert whole > SCHEMAS * 3 // 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_is_one_of_those(client: openai.OpenAI, stream: bool) -> None:
    reply: Any = client.completions.create(
        model="granite",
        prompt="the cat",
        max_tokens=50,
        stream=stream,
        extra_body={"structured_outputs": {"choice": ["the hat", "ran again"]}},
    )
    said = "".join(choice.text for part in (reply if stream else [reply]) for choice in part.choices)
    assert said in ("the hat", "ran again")


def test_a_grammar_that_cannot_be_compiled_is_the_clients_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="llama", prompt="x", extra_body={"structured_outputs": {"regex": "(("}})
    assert refused.value.param == "structured_outputs.regex"
