"""Reads what sources answer over HTTP: a client that all of a fetch shares, and answers as lists are read from."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import httpx

from aegis.core.errors import ModelRefused
from aegis.process.error_lines import flattened

_Taken = TypeVar("_Taken")
_THERE = (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT)
LIST_BYTES_MAX = 64 << 20
_TRIES = 4
_FIRST_WAIT_S = 0.5
_TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_PACKED = ("", "identity", "gzip", "deflate")
"""A piece that has come becomes at most a thousand times as many bytes by these; by others, or several, a million."""

BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
"""What is answered so may be answered otherwise later."""


def new_client() -> httpx.AsyncClient:
    return httpx.AsyncClient(follow_redirects=True, timeout=_TIMEOUT, headers={"Accept-Encoding": "identity"})


class Gone(ModelRefused):
    """The source answers that it does not have it, or not for us; `code` is the status."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.answered = code


class Away(ModelRefused):
    """The source cannot be reached, or is busy for long."""


def host_of(url: str) -> str:
    return httpx.URL(url).netloc.decode("ascii", "replace")


async def read(
    client: httpx.AsyncClient, url: str, headers: Mapping[str, str] | None = None, *, method: str = "GET"
) -> httpx.Response:
    """The whole answer, which is a list or a small file. Raises Gone, and Away after some tries."""

    async def whole(response: httpx.Response) -> httpx.Response:
        if (packed := response.headers.get("content-encoding", "")).lower() not in _PACKED:
            raise ModelRefused(
                f"{host_of(url)} answers a list that is compressed by {packed[:40]!r}, which is not read"
            )
        body = bytearray()
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > LIST_BYTES_MAX:
                raise ModelRefused(f"{host_of(url)} answers a list with more than {LIST_BYTES_MAX >> 20} MiB")
        told = httpx.Headers([pair for pair in response.headers.multi_items() if pair[0] != "content-encoding"])
        return httpx.Response(response.status_code, headers=told, content=bytes(body))

    return await _asked(client, method, url, dict(headers or {}), whole)


async def read_part(client: httpx.AsyncClient, url: str, headers: Mapping[str, str], *, start: int, stop: int) -> bytes:
    """The bytes `[start, stop)` of a file; of a server that sends no parts what comes before them is passed over.
    Raises Gone, and Away after some tries."""

    async def part(response: httpx.Response) -> bytes:
        is_part = response.status_code == httpx.codes.PARTIAL_CONTENT
        if is_part and begins_at(response, start) != start:
            raise other_part(url)
        at = start if is_part else 0
        if start - at > LIST_BYTES_MAX:
            raise ModelRefused(f"{host_of(url)} sends no parts of files, and what is needed first comes too late")
        body = bytearray()
        async for chunk in response.aiter_raw():
            body += chunk[max(0, start - at) :]
            at += len(chunk)
            if len(body) >= stop - start:
                break
        return bytes(body[: stop - start])

    asked = {name: value for name, value in headers.items() if name.lower() != "if-range"}
    return await _asked(client, "GET", url, asked | {"Range": f"bytes={start}-{stop - 1}"}, part)


async def _asked(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    headers: dict[str, str],
    take: Callable[[httpx.Response], Awaitable[_Taken]],
) -> _Taken:
    """What `take` makes of the answer. Raises Gone, and Away after some tries."""
    reason = ""
    for attempt in range(_TRIES):
        if attempt:
            await asyncio.sleep(_FIRST_WAIT_S * 2 ** (attempt - 1))
        try:
            async with client.stream(method, url, headers=headers) as response:
                if response.status_code in BUSY:
                    reason = f"answers {response.status_code}"
                    continue
                if response.status_code not in _THERE:
                    code = response.status_code
                    raise Gone(f"{host_of(url)} answers {code} to {method} {httpx.URL(url).path}", code)
                return await take(response)
        except httpx.HTTPError as error:
            reason = f"cannot be reached ({why(error)})"
        except httpx.InvalidURL:
            raise ModelRefused("its address is not one that can be asked") from None
    raise Away(f"{host_of(url)} {reason}, {_TRIES} times in a row; try again later")


def text_of(response: httpx.Response) -> str:
    """As UTF-8, whatever the server calls it: names that a URL can hold are the same in all that it may be."""
    return response.content.decode("utf-8", "replace")


def begins_at(response: httpx.Response, asked: int) -> int:
    """The byte of the file with which a part begins; where the server does not say, that which was `asked` for."""
    found = re.match(r"bytes (\d{1,18})-", response.headers.get("content-range", ""), re.ASCII)
    return int(found[1]) if found else asked


def other_part(url: str) -> ModelRefused:
    return ModelRefused(f"{host_of(url)} sends another part of a file than it is asked for; see to it")


def as_json(response: httpx.Response, what: str) -> Any:
    """Raises ModelRefused."""
    try:
        return json.loads(response.content)
    except (ValueError, RecursionError):
        raise ModelRefused(f"{what} is not readable as JSON") from None


def why(error: Exception) -> str:
    return flattened(error)[:200] or type(error).__name__
