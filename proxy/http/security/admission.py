"""Admission: a request gets its permit before its prompts are worked on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

from fastapi import Request

from proxy.http.market import Permit, Served
from proxy.http.security.key_guard import caller_of
from proxy.http.settings import market_of


class AdmittedRequest:
    """A request with a permit. The permit is closed if the request comes to nothing, unless it is kept."""

    def __init__(self, permit: Permit, undoing: ExitStack) -> None:
        self.permit = permit
        self._undoing = undoing

    def keep(self) -> Permit:
        """Keeps the permit for the code that answers, which closes it."""
        self._undoing.pop_all()
        return self.permit


@asynccontextmanager
async def admitted(request: Request, served: Served) -> AsyncIterator[AdmittedRequest]:
    """Raises UserError: 429."""
    permit = await market_of(request).permit(caller_of(request), served.spec.model)
    with ExitStack() as undoing:
        undoing.callback(permit.close, 0)
        yield AdmittedRequest(permit, undoing)


def who(request: Request) -> str:
    """The caller that counts when callers take turns. Those without a key are told apart by their addresses."""
    return caller_of(request).name or (request.client.host if request.client else "")
