"""Admission: a request gets its permit before its prompts are worked on; one with a large body gets that of its caller
before the body is read, and it counts whatever becomes of it. Otherwise a caller could have megabytes read and parsed
beyond its limits. One for the background gets it before it is answered, so that its client knows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

from fastapi import Request
from starlette.types import Message, Scope

from proxy.http.market import Permit, Served
from proxy.http.security.key_guard import caller_of
from proxy.http.settings import market_of

_EARLY = "aegis.permit"


class AdmittedRequest:
    """A request with a permit. The permit is closed if the request comes to nothing, unless it is kept."""

    def __init__(self, permit: Permit, undoing: ExitStack) -> None:
        self.permit = permit
        self._undoing = undoing

    def keep(self) -> Permit:
        """Keeps the permit for the code that answers, which closes it."""
        self._undoing.pop_all()
        return self.permit


class _JoinedPermits:
    """Implements `proxy.http.market.Permit`."""

    def __init__(self, *permits: Permit) -> None:
        self._permits = permits

    def use(self, tokens: int) -> None:
        for permit in self._permits:
            permit.use(tokens)

    def close(self, tokens: int) -> None:
        for permit in self._permits:
            permit.close(tokens)


async def admit_early(request: Request) -> None:
    """Gets the caller's permit for a request whose body is about to be read, or that is answered before it is worked
    on; harmless where it was done before. Raises UserError: 429."""
    caller, state = caller_of(request), request.scope["state"]
    if caller.limits and _EARLY not in state:
        state[_EARLY] = await market_of(request).permit(caller, None)


def end(scope: Scope) -> None:
    """The request has ended. A permit that came before its body is closed if nothing used it."""
    permit: Permit | None = scope["state"].pop(_EARLY, None)
    if permit:
        permit.close(0)


def detached(request: Request) -> Request:
    """The request for work that goes on when it has been answered, whoever is connected then. A permit that came before
    its body goes with it; `end` has to be called for its scope too."""
    state = request.scope["state"]
    scope = {**request.scope, "state": dict(state)}
    state.pop(_EARLY, None)
    return Request(scope, _nothing_comes)


async def _nothing_comes() -> Message:
    never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await never


async def _permit(request: Request, served: Served) -> Permit:
    state, market = request.scope["state"], market_of(request)
    if _EARLY not in state:
        return await market.permit(caller_of(request), served.spec.model)
    of_model = await market.permit(None, served.spec.model)
    return _JoinedPermits(state.pop(_EARLY), of_model)


@asynccontextmanager
async def admitted(request: Request, served: Served) -> AsyncIterator[AdmittedRequest]:
    """Raises UserError: 429."""
    permit = await _permit(request, served)
    with ExitStack() as undoing:
        undoing.callback(permit.close, 0)
        yield AdmittedRequest(permit, undoing)


def who(request: Request) -> str:
    """The caller that counts when callers take turns. Those without a key are told apart by their addresses."""
    return caller_of(request).name or (request.client.host if request.client else "")
