"""`/openapi.json`: FastAPI makes it from the routes, and each route declares its body, its replies and its errors.

FastAPI's own models of bodies are not used, because they would check a body before its route sees it, with errors and
statuses of their own. The declarations that read bodies (`parameters`) describe them, and the structs that are sent
describe replies. FastAPI gets references to both, because its model of a document turns bounds into floats and drops
nulls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import Any, TypedDict

from fastapi import FastAPI, Response
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute, APIRouter
from msgspec import Struct
from msgspec.json import schema_components

from proxy.http.errors import ErrorBody
from proxy.http.fields import Fields
from proxy.http.parameters import schema_of

EVENTS, LINES, PLAIN = "text/event-stream", "application/jsonl", "text/plain"
_JSON = "application/json"
_REFERENCE = "#/components/schemas/{name}"
_PROBLEMS = {
    400: "A parameter is wrong; `error.param` names it",
    401: "No key, or none that is known",
    403: "Not with this key, or not from there",
    404: "No such model or instance",
    409: "It cannot be done now, or is being done",
    413: "The body is too large",
    422: "Another request had this id",
    429: "A limit is reached; `Retry-After` says when to come again",
    503: "Not at present: the server ends, or the model failed",
    504: "An instance did not answer in time",
}
_KEYS = {
    "key": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
ASKING = (400, 401, 404, 409, 413, 422, 429, 503)
COMMANDING = (400, 401, 403, 404, 409, 413)
LOOKING = (400, 401, 403)


class Operation(TypedDict):
    """Arguments of FastAPI's decorators of routes."""

    summary: str
    response_class: type[Response]
    responses: dict[int | str, dict[str, Any]]
    openapi_extra: dict[str, Any]


class Reference(dict[str, str]):
    """A reference to the schema of a class, which becomes a component of the document."""

    def __init__(self, to: type[Struct] | type[Fields]) -> None:
        super().__init__({"$ref": _REFERENCE.format(name=to.__name__)})
        self.to = to


def operation(
    summary: str,
    *replies: type[Struct],
    takes: type[Fields] | None = None,
    kinds: tuple[str, ...] = (),
    problems: Iterable[int] | Mapping[int, str] = (401,),
    parameters: tuple[dict[str, Any], ...] = (),
    error: type[Struct] = ErrorBody,
) -> Operation:
    """For `@router.get(path, **operation(...))`.

    `replies` are what a JSON reply may be, `kinds` the media types of other replies. `problems` are the statuses of
    errors, with their meanings where these differ from what they mean elsewhere. `parameters` are those of the path and
    the query, as OpenAPI has them; `error` is the form of errors.
    """
    content: dict[str, Any] = {kind: {} for kind in kinds}
    if replies:
        each = [Reference(reply) for reply in replies]
        content[_JSON] = {"schema": each[0] if len(each) == 1 else {"anyOf": each}}
    refusal = {_JSON: {"schema": Reference(error)}}
    meanings = problems if isinstance(problems, Mapping) else {status: _PROBLEMS[status] for status in problems}
    extra: dict[str, Any] = {"parameters": list(parameters)} if parameters else {}
    if takes is not None:
        extra["requestBody"] = {"required": True, "content": {_JSON: {"schema": Reference(takes)}}}
    responses: dict[int | str, dict[str, Any]] = {200: {"description": "Done", "content": content}}
    responses |= {status: {"description": meaning, "content": refusal} for status, meaning in meanings.items()}
    return Operation(summary=summary, response_class=Response, responses=responses, openapi_extra=extra)


def install(app: FastAPI, routers: Iterable[APIRouter]) -> None:
    """Makes `app` serve the document of the routers. The first request for it makes it."""

    def document() -> dict[str, Any]:
        if not app.openapi_schema:
            app.openapi_schema = _document(app.title, app.version, _routes(routers))
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _routes(routers: Iterable[APIRouter]) -> list[APIRoute]:
    """Copies, because the document needs changes that serving does not."""
    routes = [each for router in routers for each in router.routes if isinstance(each, APIRoute)]
    return [copy(each) for each in routes if each.include_in_schema]


def _document(title: str, version: str, routes: list[APIRoute]) -> dict[str, Any]:
    for route in routes:
        route.operation_id = route.name
        route.methods = (route.methods or set()) - {"HEAD"}  # which is as GET is
    document = get_openapi(title=title, version=version, routes=routes)
    referred = {each.to for route in routes for each in _references([route.responses, route.openapi_extra])}
    structs = sorted((each for each in referred if issubclass(each, Struct)), key=lambda each: each.__name__)
    _, schemas = schema_components(structs, ref_template=_REFERENCE)
    schemas |= {each.__name__: schema_of(each) for each in referred if issubclass(each, Fields)}
    return document | {
        "security": [{}, {"key": []}, {"x-api-key": []}],
        "components": {"schemas": schemas, "securitySchemes": _KEYS},
    }


def _references(value: Any) -> Iterator[Reference]:
    if isinstance(value, Reference):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _references(each)
