"""Permits of one proxy's requests. The books are the node's: limits are the server's, however many proxies it has.

Where nothing is limited nobody is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

from aegis.core.clock import NS_PER_S
from aegis.core.errors import UserError
from aegis.core.limits import Scope
from aegis.transport.node_messages import FromProxy, PermitAnswer, PermitOver, PermitUsed, PermitWanted


class LivePermit:
    """Implements `proxy.http.market.Permit`."""

    def __init__(self, number: int, send: Callable[[FromProxy], None]) -> None:
        self._number = number
        self._send = send

    def use(self, tokens: int) -> None:
        self._send(PermitUsed(self._number, tokens))

    def close(self, tokens: int) -> None:
        self._send(PermitOver(self._number, tokens))


class Unlimited:
    """Implements `proxy.http.market.Permit`: nobody keeps books of it."""

    def use(self, tokens: int) -> None:
        pass

    def close(self, tokens: int) -> None:
        pass


class ProxyPermits:
    """`send` reaches the node, which answers in `answered`."""

    def __init__(self, send: Callable[[FromProxy], None]) -> None:
        self._send = send
        self._numbers = count()
        self._pending: dict[int, asyncio.Future[PermitAnswer]] = {}

    async def ask(self, scopes: tuple[Scope, ...]) -> LivePermit | Unlimited:
        """Raises UserError: 429."""
        limited = tuple(scope for scope in scopes if scope.limits)
        if not limited:
            return Unlimited()
        number = next(self._numbers)
        pending = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(PermitWanted(number, limited))
            answer = await pending
        except asyncio.CancelledError:
            self._send(PermitOver(number, 0))  # it may have been given
            raise
        finally:
            del self._pending[number]
        if answer.refused:
            wait_s = -(-answer.wait_ns // NS_PER_S)
            message = f"{answer.refused}; try again in {wait_s} s"
            raise too_many(message, wait_s, "rate_limit_exceeded", reason=f"{answer.kind}_limit")
        return LivePermit(number, self._send)

    def answered(self, answer: PermitAnswer) -> None:
        pending = self._pending.get(answer.number)
        if pending and not pending.done():
            pending.set_result(answer)


def too_many(message: str, retry_after_s: int, code: str, *, reason: str | None = None) -> UserError:
    wait_s = max(retry_after_s, 1)
    return UserError(message, status=429, code=code, kind="rate_limit_error", retry_after_s=wait_s, reason=reason)
