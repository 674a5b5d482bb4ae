"""Requests for a model that is still being registered: held until it is there, and told meanwhile how far that is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from fastapi import Request, Response

from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from proxy.http.client_disconnect import while_connected
from proxy.http.market import Market, Served
from proxy.http.openai.models import Task, find_servable
from proxy.http.request.body import ModelBody
from proxy.http.request_ids import make_known
from proxy.http.settings import keep_alive_of, market_of
from proxy.http.streaming.event_stream import Emit, EventStream, comment, error_event

_LOOK_S = 0.1


class HeldBody(Protocol):
    """A body that names a model."""

    @property
    def model(self) -> str: ...

    @property
    def stream(self) -> bool: ...


async def held(
    request: Request,
    body: HeldBody,
    respond: Callable[[], Awaitable[Response]],
    failed: Callable[[UserError], bytes] = error_event,
) -> Response:
    """The answer of `respond`, once the model that the request names is there, or is known not to come. A stream begins
    at once; an error afterwards is its last event, as `failed` words it. Raises UserError."""
    market, name = market_of(request), body.model
    if not _is_coming(market, name) or not body.stream:
        await come(request, name)
        return await respond()
    tries = _want(market, name)

    async def write(emit: Emit) -> None:
        make_known(request)
        await emit(comment(status()))
        await _come(market, name, tries)
        response = await respond()
        assert isinstance(response, EventStream)
        await response.carry_on(request.scope, emit)

    def status() -> str:
        coming = market.coming().get(name)
        return f"model {name!r} is being registered: {coming.progress}" if coming else "waiting"

    return EventStream(write, keep_alive_of(request), status=status, failed=failed)


async def found(request: Request, body: ModelBody, task: Task | None = "generate") -> Served:
    """The model that the request names, once it is there. Raises UserError."""
    await come(request, body.model)
    return find_servable(market_of(request), body, task)


async def come(request: Request, name: str) -> None:
    """Returns once the model is there, or is known not to come. Raises UserError."""
    market = market_of(request)
    if _is_coming(market, name):
        await while_connected(request.receive, _come(market, name, _want(market, name)))


def _is_coming(market: Market, name: str) -> bool:
    return name not in market.models() and name in market.coming()


def _want(market: Market, name: str) -> int:
    """A lazy model is registered now, if it is not already. How often that has failed before."""
    before = market.coming()[name]
    if before.lazy:
        market.want(ModelId(name))
    return before.tries


async def _come(market: Market, name: str, tries: int) -> None:
    """Raises UserError where it was tried since and did not come."""
    while _is_coming(market, name):
        coming = market.coming()[name]
        if coming.lazy and coming.tries > tries:
            message = f"model {name!r} cannot be served now: {coming.refusal}"
            raise UserError(message, status=503, param="model", code="model_not_fetched", kind="server_error")
        await asyncio.sleep(_LOOK_S)
