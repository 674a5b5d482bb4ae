"""The responses that one proxy is generating, so that a client can cancel one from another connection, or through
another proxy."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from proxy.http.responses.response_items import ResponseObject


@dataclass(slots=True, eq=False)
class RunningResponse:
    """`stop` is set when it shall end; `last` is the response as it ended, None where its client had left."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    last: asyncio.Future[ResponseObject | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class RunningResponses:
    """The responses that are being made, by the keys under which they will be kept."""

    def __init__(self) -> None:
        self._running: dict[str, RunningResponse] = {}

    def begin(self, key: str) -> RunningResponse:
        """Where one of that key runs already, that one is still the one to cancel: a retry meanwhile is refused."""
        begun = RunningResponse()
        self._running.setdefault(key, begun)
        return begun

    def end(self, key: str, running: RunningResponse, last: ResponseObject | None) -> None:
        """The first time counts."""
        if self._running.get(key) is running:
            del self._running[key]
        if not running.last.done():
            running.last.set_result(last)

    async def cancel(self, key: str) -> ResponseObject | None:
        """The response as it ended; None where there is none that runs."""
        running = self._running.get(key)
        if running is None:
            return None
        running.stop.set()
        return await asyncio.shield(running.last)
