"""Frameworks for agents, unmodified, with a model that calls a tool: the programs of `docs/clients.md`, and all APIs
that each framework speaks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests import embedders, tool_caller
from tests.live import market
from tests.live.server import SPLIT, Server, launched
from tests.long_forms import first_of
from tests.snippets import snippet

CALLER, EMBEDDER = "caller", "embedder"
DONE = "".join(tool_caller.AFTERWARDS)


class Place(BaseModel):
    """Where to go."""

    city: str
    days: int


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Server]:
    """A server of a model that calls tools and one that embeds, which takes another engine in each instance."""
    directory = tmp_path_factory.mktemp("clients")
    tool_caller.write(directory / "models" / CALLER, context_tokens=1 << 12)
    embedders.write(directory / "models" / EMBEDDER, "bert", pooling={"pooling_mode_mean_tokens": True})
    options = ["--models", str(directory / "models"), "--dtype", "float32", "--device-memory", "64MiB", *SPLIT]
    options += ["--engine", market.ENGINE, "--proxies", str(market.PROXIES), *market.PIECES]
    with launched(directory / "server", cache, *options, "--debug-memory") as running:
        running.wait_for_ready()
        yield running


def run(server: Server, heading: str) -> dict[str, Any]:
    """The program under the heading, and the names that it leaves."""
    names: dict[str, Any] = {"__name__": "snippet"}
    program = snippet(f"Python: {heading}", server.url, model=CALLER, embedder=EMBEDDER)
    exec(compile(program, heading, "exec", dont_inherit=True), names)
    return names


@pytest.mark.parametrize(
    "heading", first_of(3, ["pydantic-ai", "langchain-openai", "langchain-anthropic", "openai-agents"])
)
def test_the_programs_of_the_documentation_call_a_tool_and_stream_what_comes_of_it(
    calling: Server, heading: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run(calling, heading)
    assert capsys.readouterr().out == DONE
    if "Place" in names:
        assert isinstance(names["place"], names["Place"])
    if "told" in names:
        assert [each.content for each in names["told"]] == ["It is warm in Paris."]
    if "vectors" in names:
        assert len({len(vector) for vector in names["vectors"]}) == 1 and len(names["vectors"]) == 2


def weather(city: str) -> str:
    """The weather of a city."""
    return f"It is warm in {city}."


def pydantic_model(server: Server, api: str) -> Any:
    """Frameworks take seconds to import, and every process of tests reads this file."""
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    if api == "messages":
        return AnthropicModel(CALLER, provider=AnthropicProvider(base_url=server.url, api_key="none"))
    kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[api]
    return kind(CALLER, provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key="none"))


@pytest.mark.parametrize("api", first_of(1, ["chat", "responses", "messages"]))
def test_pydantic_ai_calls_a_tool_before_it_answers_in_a_format(calling: Server, api: str) -> None:
    from pydantic_ai import Agent, NativeOutput

    model = pydantic_model(calling, api)
    assert Agent(model, tools=[weather]).run_sync("How is the weather?").output == DONE
    form: Any = Place if api == "messages" else NativeOutput(Place)  # the first: a tool more
    run = Agent(model, tools=[weather], output_type=form).run_sync("How is the weather?")
    assert isinstance(run.output, Place)
    assert api == "messages" or "It is warm in Paris." in str(run.all_messages())


@pytest.mark.parametrize("api", first_of(0, ["chat", "responses"]))
def test_openai_agents_call_a_tool_before_they_answer_in_a_format(calling: Server, api: str) -> None:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    kind = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[api]

    async def main() -> agents.RunResult:
        async with openai.AsyncOpenAI(base_url=f"{calling.url}/v1", api_key="none", max_retries=0) as client:
            model = kind(model=CALLER, openai_client=client)
            tools: list[agents.Tool] = [agents.function_tool(weather)]
            agent = agents.Agent(name="guide", model=model, tools=tools, output_type=Place)
            return await agents.Runner.run(agent, "How is the weather?")

    result = asyncio.run(main())
    assert isinstance(result.final_output, Place)
    assert [type(item).__name__ for item in result.new_items[:2]] == ["ToolCallItem", "ToolCallOutputItem"]


def langchain_model(server: Server, api: str) -> Any:
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    if api == "messages":
        return ChatAnthropic(model=CALLER, base_url=server.url, api_key="none", max_tokens=64)
    address = {"base_url": f"{server.url}/v1", "api_key": "none"}
    return ChatOpenAI(model=CALLER, use_responses_api=api == "responses", **address)


@pytest.mark.parametrize("api", first_of(1, ["chat", "responses", "messages"]))
def test_langchain_streams_calls_and_text_and_parses_answers(calling: Server, api: str) -> None:
    chat = langchain_model(calling, api)
    with_tools = chat.bind_tools([weather])
    called: Any = None
    for part in with_tools.stream("How is the weather?"):
        called = part if called is None else called + part
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call["id"], "content": weather(**call["args"])}
    told = with_tools.stream([{"role": "user", "content": "How is the weather?"}, called, result])
    assert "".join(part.text for part in told) == DONE
    for method in ("function_calling", "json_schema"):
        assert isinstance(chat.with_structured_output(Place, method=method).invoke("Where?"), Place)
