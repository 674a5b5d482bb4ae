"""Sends requests over HTTP, each at its time whatever becomes of the others (an open loop)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import aiohttp

from bench.serve.answer import Answer, RequestFailed, error_message
from bench.serve.plan import Outcome, Planned

_REASON_CHARACTERS_MAX = 200
_KEEP_ALIVE_S = 2.0  # less than servers usually keep a connection, so that none is used again just as it is closed


def open_session(key: str | None, *, silence_s: float, keeps: bool = True) -> aiohttp.ClientSession:
    """Connections without a limit to their number, kept for further requests where it `keeps` them. A request fails
    after `silence_s` in which nothing came."""
    kept: dict[str, Any] = {"keepalive_timeout": _KEEP_ALIVE_S} if keeps else {"force_close": True}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, **kept),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=silence_s, sock_read=silence_s),
        headers={"Authorization": f"Bearer {key}"} if key else {},
    )


class Client:
    """Streams the answers of one endpoint. `key` is kept out of the reasons of failures, should a server repeat it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str | None = None) -> None:
        self._session = session
        self._url = url
        self._key = key

    async def ask(self, body: bytes, answer: Answer, now_ns: Callable[[], int]) -> None:
        """Posts `body` and feeds `answer` to its end. Raises RequestFailed."""
        try:
            async with self._session.post(
                self._url, data=body, headers={"Content-Type": "application/json"}
            ) as response:
                if response.status != 200:
                    raise RequestFailed(f"HTTP {response.status}: {await _reason(response)}", response.status)
                if response.content_type != "text/event-stream":
                    raise RequestFailed(f"the answer is {response.content_type}, no event stream")
                async for data in response.content.iter_any():
                    answer.feed(data, now_ns())
            answer.ended()
        except RequestFailed as error:
            raise RequestFailed(self._line(str(error)), error.status) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise RequestFailed(_broken(error)) from None

    def _line(self, reason: str) -> str:
        hidden = reason.replace(self._key, "***") if self._key else reason
        line = "".join(c if c.isprintable() else " " for c in hidden)
        return line if len(line) <= _REASON_CHARACTERS_MAX else line[: _REASON_CHARACTERS_MAX - 1] + "…"


async def replay(
    client: Client,
    plan: Sequence[Planned],
    body_of: Callable[[Planned, int], bytes],
    *,
    max_concurrency: int | None = None,
    ended: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Sends each request of `plan`, in order of their times, worded by `body_of(planned, index)`.

    Returns what became of them, in the same order. `ended` is told of each as it ends. With `max_concurrency` a
    request waits at its time until fewer are under way; that is then no open loop any more.
    """
    gate: AbstractAsyncContextManager[object] = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    start_ns = time.monotonic_ns()

    def now_ns() -> int:
        return time.monotonic_ns() - start_ns

    async def send(index: int, planned: Planned) -> Outcome:
        late_ns = now_ns() - planned.at_ns
        body, answer, failure = body_of(planned, index), Answer(), ""
        async with gate:
            sent_ns = now_ns()
            try:
                await client.ask(body, answer, now_ns)
            except RequestFailed as error:
                failure = str(error)
        stop_ns = now_ns()
        outcome = Outcome(
            request=index,
            planned=planned,
            late_ns=late_ns,
            sent_ns=sent_ns,
            stop_ns=stop_ns,
            input_tokens=planned.input_tokens if answer.prompt_tokens is None else answer.prompt_tokens,
            token_times_ns=tuple(answer.token_times_ns(stop_ns)),
            finish=answer.finish,
            failure=failure,
        )
        ended(outcome)
        return outcome

    tasks = []
    async with asyncio.TaskGroup() as group:
        for index, planned in enumerate(plan):
            await asyncio.sleep(max(planned.at_ns - now_ns(), 0) / 1e9)  # of nothing too: lets the one before start
            tasks.append(group.create_task(send(index, planned)))
    return [task.result() for task in tasks]


async def _reason(response: aiohttp.ClientResponse) -> str:
    try:
        content = await response.json(content_type=None)
    except (ValueError, aiohttp.ClientError):
        return response.reason or "no reason given"
    error = content.get("error", content.get("detail")) if isinstance(content, dict) else content
    return error_message(error)


def _broken(error: Exception) -> str:
    match error:
        case TimeoutError():
            return "no answer in time"
        case aiohttp.ClientConnectorError():
            return f"cannot connect ({error.strerror or error.os_error})"
        case aiohttp.ServerDisconnectedError():
            return "the connection was closed before the answer"
        case aiohttp.ClientPayloadError() | ConnectionError():
            return "the connection broke in the answer"
    return f"HTTP is broken ({type(error).__name__})"
