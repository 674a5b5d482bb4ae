"""Requests for a model that is still being registered: held until it is there, and told meanwhile how far that is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import Request, Response

from proxy.http.client_disconnect import while_connected
from proxy.http.market import Market
from proxy.http.request.sampling import GenerationBody
from proxy.http.request_ids import make_known
from proxy.http.settings import keep_alive_of, market_of
from proxy.http.streaming.event_stream import Emit, EventStream, comment

_LOOK_S = 0.1


async def held(request: Request, body: GenerationBody, respond: Callable[[], Awaitable[Response]]) -> Response:
    """The answer of `respond`, once the model that the request names is there, or is known not to come. A stream begins
    at once; an error afterwards is its last event. Raises UserError."""
    market, name = market_of(request), body.model
    if not _is_coming(market, name) or not body.stream:
        await come(request, name)
        return await respond()

    async def write(emit: Emit) -> None:
        make_known(request)
        await emit(comment(status()))
        await _come(market, name)
        response = await respond()
        assert isinstance(response, EventStream)
        await response.carry_on(emit)

    def status() -> str:
        coming = market.coming().get(name)
        return f"model {name!r} is being registered: {coming.progress}" if coming else "waiting"

    return EventStream(write, keep_alive_of(request), status=status)


async def come(request: Request, name: str) -> None:
    """Returns once the model is there, or is known not to come."""
    if _is_coming(market_of(request), name):
        await while_connected(request.receive, _come(market_of(request), name))


def _is_coming(market: Market, name: str) -> bool:
    return name not in market.models() and name in market.coming()


async def _come(market: Market, name: str) -> None:
    while _is_coming(market, name):
        await asyncio.sleep(_LOOK_S)
