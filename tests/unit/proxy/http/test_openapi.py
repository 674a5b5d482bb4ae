"""The OpenAPI document: that it says what the server does, and that nothing drawn from it harms the server.

The application is in this process, models say what a script says; `tests/live/api/test_fuzz.py` asks real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute

from proxy.http import dashboard
from proxy.http.admin import adapters, history, memory, model_admin, status
from proxy.http.anthropic import messages
from proxy.http.fields import Fields, Parameter, Unsupported
from proxy.http.openai import chat, completions, embeddings, models, rerank, tokenize
from proxy.http.responses import responses
from proxy.http.security.authorise import authorise
from proxy.http.security.key_guard import ADMIN
from tests.fuzzing import fuzz, operations
from tests.long_forms import first_rows_of
from tests.unit.proxy.http.live import serving
from tests.unit.proxy.http.scripted import byte_text, get, market, pooling_market, post, says

DOCUMENT: dict[str, Any] = get(market(), "/openapi.json").json()
ANSWERING = (completions, chat, messages, responses, embeddings, rerank, tokenize)
ROUTERS = (*ANSWERING, models, model_admin, adapters, memory, history, dashboard, status)
POOLING = {"/v1/embeddings": "e", "/v1/rerank": "r", "/v1/score": "r"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(pooling_market()) as url:
        yield url


@pytest.mark.parametrize(("path", "method", "cases"), operations(DOCUMENT))
def test_nothing_that_is_asked_is_an_error_of_the_server(url: str, path: str, method: str, cases: int) -> None:
    model = POOLING.get(path, "m")
    counts = fuzz(DOCUMENT, path, method, cases, model, lambda case: case.call(base_url=url))
    assert sum(counts.values()) > 0


def test_every_route_is_in_it_but_those_of_pages() -> None:
    routes = {
        (route.path_format, method.lower())
        for part in ROUTERS
        for route in part.router.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods - {"HEAD"}
    }
    assert routes == {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}


ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Commands, too, at the paths that vLLM gives them."""


def test_every_command_is_authorised() -> None:
    """The guard passes on to these whoever asks."""
    for part in ROUTERS:
        for route in part.router.routes:
            assert isinstance(route, APIRoute)
            guarded = any(each.dependency is authorise for each in route.dependencies)
            assert guarded == route.path.startswith((*ADMIN, *ADAPTERS)), route.path


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES = [
    {"role": "system", "content": "x"},
    {"role": "user", "content": "x"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "x"},
]
TOOLS = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
}
TURNS = [{"role": "user", "content": "x"}]
USED = {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "tool", "name": "f"}}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
BODIES: list[tuple[str, str, dict[str, Any]]] = [
    ("/v1/completions", "CompletionBody", {"prompt": "x", "response_format": SCHEMA} | STREAM),
    ("/v1/completions", "CompletionBody", {"prompt": "x", "structured_outputs": {"regex": "x"}}),
    ("/v1/chat/completions", "ChatBody", {"messages": MESSAGES} | TOOLS),
    ("/tokenize", "TokenizeBody", {"messages": MESSAGES} | TOOLS),
    ("/tokenize", "TokenizeBody", {"prompt": "x"}),
    ("/detokenize", "DetokenizeBody", {"tokens": [1]}),
    (
        "/v1/messages",
        "MessageBody",
        {"max_tokens": 9, "messages": TURNS, "system": "x", "stop_sequences": ["y"]} | USED,
    ),
    ("/v1/messages/count_tokens", "TokensBody", {"messages": TURNS, "system": "x"} | USED),
    (
        "/v1/responses",
        "ResponseBody",
        {"input": "x", "tools": [FUNCTION], "tool_choice": "required", "text": {"format": {"type": "text"}}},
    ),
    ("/models/load", "LoadBody", {"source": "x"}),
    ("/v1/load_lora_adapter", "LoadAdapterBody", {"lora_name": "x", "lora_path": "y"}),
    ("/models/update", "UpdateBody", {"slo": {"ttft_ms": 9}, "limits": {"concurrent": 1}}),
    ("/models/evict", "ModelBody", {}),
    ("/debug/memory/limit", "LimitBody", {"instance": "x", "limit": 1}),
    ("/debug/memory/trim", "TrimBody", {"instance": "x"}),
]


@pytest.mark.parametrize(("path", "component", "body"), first_rows_of(2, list(BODIES)))
def test_it_lists_the_parameters_that_are_taken_and_each_is_read(
    path: str, component: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: dict[Fields, set[str]] = {}
    ended: list[str] = []
    of, take, end, supported = Parameter.__get__, Fields.take, Fields.end, Fields.names_are_supported

    def reads(self: Parameter[Any, Any], fields: Fields | None, owner: type[Fields] | None = None) -> Any:
        if fields is not None:
            read.setdefault(fields, set()).add(self.name)
        return of(self, fields, owner)

    def takes(self: Fields, name: str) -> Any:
        read.setdefault(self, set()).add(name)
        return take(self, name)

    def is_given(self: Fields, name: str) -> bool:
        return self.take(name) is not None

    def check(self: Fields, kind: type[Fields] | None = None) -> None:
        parameters = {name: getattr(kind or type(self), name) for name in (kind or self)._names}
        known = {name for name, each in parameters.items() if not isinstance(each, Unsupported)}
        idle = {name for name in known if parameters[name].about.startswith(("Ignored", "Without effect"))}
        assert known - idle <= read[self], known - idle - read[self]
        ended.append(self._prefix)

    def ends(self: Fields, kind: type[Fields] | None = None) -> None:
        check(self, kind)
        end(self, kind)

    def is_supported(self: Fields) -> bool:
        check(self)
        return supported(self)

    monkeypatch.setattr(Parameter, "__get__", reads)
    monkeypatch.setattr(Fields, "take", takes)
    monkeypatch.setattr(Fields, "given", is_given)
    monkeypatch.setattr(Fields, "end", ends)
    monkeypatch.setattr(Fields, "names_are_supported", is_supported)
    named = (
        {}
        if path in ("/models/load", "/v1/load_lora_adapter", "/debug/memory/limit", "/debug/memory/trim")
        else {"model": "m"}
    )
    behind = market(says("{}"), text=byte_text("{{ tools }}{{ messages }}"))
    reply = post(behind, path, named | body)
    assert reply.status_code == 200, reply.text
    assert "" in ended
    content = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    assert content["schema"] == {"$ref": f"#/components/schemas/{component}"}
    listed = set(DOCUMENT["components"]["schemas"][component]["properties"])
    taken = {each for fields, names in read.items() if type(fields).__name__ == component for each in names}
    assert taken <= listed
