"""Lists as servers send them."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable

import httpx
import pytest

from aegis.core.errors import ModelRefused
from aegis.models.remote import http
from aegis.models.remote.http import Away, Gone, as_json, read, text_of

URL = "http://host/folder/"


def answered(answer: Callable[[httpx.Request], httpx.Response]) -> httpx.Response:
    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            return await read(client, URL)

    return asyncio.run(main())


def test_a_list_that_is_compressed_though_nobody_asked_is_read() -> None:
    headers = {"Content-Encoding": "gzip", "Link": '<http://host/2>; rel="next"'}
    found = answered(lambda request: httpx.Response(200, headers=headers, content=gzip.compress(b"[1]")))
    assert as_json(found, "it") == [1] and found.links["next"]["url"] == "http://host/2"


def test_a_busy_server_is_asked_again_and_then_called_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_FIRST_WAIT_S", 0.0)
    codes = [503, 429, 200]
    assert answered(lambda request: httpx.Response(codes.pop(0))).status_code == 200
    with pytest.raises(Away, match="host answers 502, 4 times in a row; try again later"):
        answered(lambda request: httpx.Response(502))


def test_what_is_not_there_is_said_at_once() -> None:
    asked = []
    with pytest.raises(Gone, match="host answers 404 to GET /folder/") as gone:
        answered(lambda request: asked.append(1) or httpx.Response(404))
    assert (gone.value.answered, len(asked)) == (404, 1)


def test_a_list_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LIST_BYTES_MAX", 1 << 20)
    with pytest.raises(ModelRefused, match="answers a list with more than 1 MiB"):
        answered(lambda request: httpx.Response(200, content=bytes((1 << 20) + 1)))


@pytest.mark.parametrize("packed", ["zstd", "br", "gzip, gzip"])
def test_a_list_that_a_few_bytes_make_endless_is_refused(packed: str) -> None:
    body = gzip.compress(gzip.compress(b"[1]"))
    with pytest.raises(ModelRefused, match=f"host answers a list that is compressed by '{packed}', which is not read"):
        answered(lambda request: httpx.Response(200, headers={"Content-Encoding": packed}, stream=_Bytes(body)))


class _Bytes(httpx.AsyncByteStream):
    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content


def test_a_page_is_read_whatever_it_is_called() -> None:
    headers = {"Content-Type": "text/html; charset=zlib_codec"}
    found = answered(lambda request: httpx.Response(200, headers=headers, content="<a href='é'>".encode()))
    assert text_of(found) == "<a href='é'>"


def test_what_is_no_json_is_refused() -> None:
    with pytest.raises(ModelRefused, match="it is not readable as JSON"):
        as_json(httpx.Response(200, content=b"[" * 100_000), "it")
