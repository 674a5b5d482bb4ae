"""The OpenAPI document: that it says what the server does, and that nothing drawn from it harms the server.

The application is in this process, models say what a script says; `tests/live/api/test_fuzz.py` asks real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute

from proxy.http import dashboard
from proxy.http.admin import history, memory, model_admin, status
from proxy.http.fields import Fields
from proxy.http.openai import chat, completions, models, tokenize
from proxy.http.schema.openapi import document
from proxy.http.security.authorise import authorise
from proxy.http.security.key_guard import ADMIN
from tests.fuzzing import fuzz, operations
from tests.unit.proxy.http.live import serving
from tests.unit.proxy.http.scripted import market, post, says

ROUTERS = (completions, chat, models, model_admin, memory, history, dashboard, tokenize, status)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(market(says("hello"))) as url:
        yield url


@pytest.mark.parametrize(("path", "method", "cases"), operations(document()))
def test_nothing_that_is_asked_is_an_error_of_the_server(url: str, path: str, method: str, cases: int) -> None:
    counts = fuzz(document(), path, method, cases, "m", lambda case: case.call(base_url=url))
    assert sum(counts.values()) > 0


def test_every_route_is_in_it_but_those_of_pages() -> None:
    routes = {
        (route.path.replace("{name:path}", "{model}"), method.lower())
        for part in ROUTERS
        for route in part.router.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods - {"HEAD"}
    }
    assert routes == {(path, method) for path, methods in document()["paths"].items() for method in methods}


def test_every_command_is_authorised() -> None:
    """The guard passes on to these whoever asks."""
    for part in ROUTERS:
        for route in part.router.routes:
            assert isinstance(route, APIRoute)
            guarded = any(each.dependency is authorise for each in route.dependencies)
            assert guarded == route.path.startswith(ADMIN), route.path


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"messages": [{"role": "user", "content": "x"}]},
    "/detokenize": {"tokens": [1]},
}


@pytest.mark.parametrize("path", BODIES)
def test_it_lists_the_parameters_that_are_taken(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: set[str] = set()
    refused: set[str] = set()
    end, unsupported = Fields.end, Fields.unsupported

    def ended(self: Fields) -> None:
        taken.update(self._known if not self._prefix else ())
        end(self)

    def seen(self: Fields, name: str, neutral: tuple[object, ...] = ()) -> None:
        refused.update([name] if not self._prefix and not neutral else ())
        unsupported(self, name, neutral)

    monkeypatch.setattr(Fields, "end", ended)
    monkeypatch.setattr(Fields, "unsupported", seen)
    assert post(market(), path, {"model": "m"} | BODIES[path]).status_code == 200
    schema = document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["properties"]) == taken - refused
