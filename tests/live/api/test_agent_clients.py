"""Frameworks for agents, unmodified, with a model that calls a tool: the programs of `docs/clients.md`, and all APIs
that each framework speaks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests import embedders, tool_caller
from tests.live.server import Server
from tests.snippets import snippet

CALLER, EMBEDDER = "caller", "embedder"
DONE = "".join(tool_caller.AFTERWARDS)


class Place(BaseModel):
    """Where to go."""

    city: str
    days: int


@contextmanager
def added(server: Server, name: str, source: Path) -> Iterator[None]:
    reply = server.post("/models/load", {"source": str(source), "name": name})
    assert reply.status_code == 200, reply.text
    yield
    assert server.post("/models/unload", {"model": name}).status_code == 200


@pytest.fixture(scope="module")
def calling(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server, with a model that calls tools and one that embeds."""
    directory = tmp_path_factory.mktemp("clients")
    caller = tool_caller.write(directory / CALLER, context_tokens=1 << 12)
    embedder = embedders.write(directory / EMBEDDER, "bert", pooling={"pooling_mode_mean_tokens": True})
    with added(server, CALLER, caller), added(server, EMBEDDER, embedder):
        yield server


def run(server: Server, heading: str) -> dict[str, Any]:
    """The program under the heading, and the names that it leaves."""
    names: dict[str, Any] = {"__name__": "snippet"}
    program = snippet(f"Python: {heading}", server.url, model=CALLER, embedder=EMBEDDER)
    exec(compile(program, heading, "exec", dont_inherit=True), names)
    return names


@pytest.mark.parametrize("heading", ["openai-agents", "pydantic-ai", "langchain-openai", "langchain-anthropic"])
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
