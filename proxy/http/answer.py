"""From the choices of a call to the reply: an event stream, or one JSON object with the same content."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from fastapi import Request, Response
from msgspec import Struct, structs

from proxy.http.boundary import Served
from proxy.http.choice import Call, Choice, Order, Usage
from proxy.http.connection import while_connected
from proxy.http.edge import note
from proxy.http.records import Asked
from proxy.http.replies import json_reply
from proxy.http.request_ids import id_of
from proxy.http.sampling import Wish
from proxy.http.settings import market_of, records_of, settings_of
from proxy.http.sse import DONE, Emit, EventStream, event
from proxy.http.transcript import Piece, join


class Shape(Protocol):
    """How one API words its replies."""

    def chunk(self, index: int, piece: Piece) -> Struct: ...

    def usage(self, usage: Usage) -> Struct:
        """The chunk after all others, where the client asked for it."""
        ...

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> Struct:
        """The reply that is not streamed; one joined piece per choice."""
        ...


async def answer(request: Request, served: Served, orders: Sequence[Order], wish: Wish, shape: Shape) -> Response:
    """Submits the sequences and answers with them. Raises UserError; ClientGone where nobody waits any more."""
    record = await records_of(request).open(_asked(request, served, orders, wish))
    try:
        call = await Call.submit(market_of(request), served, orders, wish, record)
    except BaseException:
        record.close()
        raise

    def close() -> None:
        call.cancel()
        record.close()
        usage = call.usage()
        note(request.scope, model=served.spec.model, prompt_tokens=usage.prompt_tokens, tokens=usage.completion_tokens)

    if wish.stream:
        return EventStream(_writer(call, shape, wish.include_usage), close, settings_of(request).keep_alive_s)
    try:
        return await _whole(request, call, shape)
    finally:
        close()


def _asked(request: Request, served: Served, orders: Sequence[Order], wish: Wish) -> Asked:
    return Asked(
        id_of(request.scope),
        f"{request.url.path} {wish.fingerprint}",
        served.spec.model,
        served.spec.slo,
        structs.replace(wish.sampling, max_tokens=orders[0].max_tokens, seed=wish.seed),
        len(orders) * wish.choices,
    )


async def _whole(request: Request, call: Call, shape: Shape) -> Response:
    pieces: list[list[Piece]] = [[] for _ in call.choices]

    async def collect(choice: Choice, piece: Piece) -> None:
        pieces[choice.index].append(piece)

    await while_connected(request.receive, call.run(collect))
    return json_reply(shape.whole([join(x) for x in pieces], call.usage()))


def _writer(call: Call, shape: Shape, include_usage: bool) -> Callable[[Emit], Awaitable[None]]:
    async def write(emit: Emit) -> None:
        async def chunk(choice: Choice, piece: Piece) -> None:
            await emit(event(shape.chunk(choice.index, piece)))

        await call.run(chunk)
        if include_usage:
            await emit(event(shape.usage(call.usage())))
        await emit(DONE)

    return write
