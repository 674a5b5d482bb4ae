"""Checkpoints behind any web server: a folder whose index is JSON or a page of links, or one GGUF file."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

import httpx
from msgspec.structs import replace

from aegis.core.errors import ModelRefused
from aegis.models.remote.address import WebAddress
from aegis.models.remote.http import Gone, as_json, read, text_of
from aegis.models.remote.listing import (
    FILES_MAX,
    SUMS,
    Listing,
    RemoteFile,
    as_size,
    beside_weights,
    read_sums,
    refuse_climbing,
)

_HEADS_AT_ONCE = 8
_NO_HEAD = (405, 501)
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")


class Folder:
    """The folder at an address, or beside the index that the address names."""

    def __init__(self, address: WebAddress) -> None:
        self._index = address.url if address.url.endswith(".json") else address.url.rstrip("/") + "/"

    async def listing(self, client: httpx.AsyncClient) -> Listing:
        """Raises ModelRefused."""
        answer = await read(client, self._index)
        is_page = "html" in answer.headers.get("content-type", "")
        entries = _links(text_of(answer), self._index) if is_page else _entries(as_json(answer, "the folder's index"))
        if len(entries) > FILES_MAX:
            raise ModelRefused(f"it has more than {FILES_MAX} files")
        refuse_climbing(entry.name for entry in entries)
        found = [replace(entry, url=urljoin(self._index, quote(entry.name))) for entry in entries]
        if any(file.name == SUMS for file in found):
            sums = read_sums(text_of(await read(client, urljoin(self._index, SUMS))))
            found = [replace(file, sha256=file.sha256 or sums.get(file.name)) for file in found]
        needed = {file.name for file in beside_weights(Listing(tuple(found)))}
        gate = asyncio.Semaphore(_HEADS_AT_ONCE)
        asked = [file.name in needed or file.name.endswith(".safetensors") for file in found]
        files = await asyncio.gather(
            *(_headed(client, file, gate) for file, wanted in zip(found, asked, strict=True) if wanted)
        )
        pickled = [file for file, wanted in zip(found, asked, strict=True) if not wanted]
        return Listing((*files, *pickled))

    async def locate(self, file: RemoteFile) -> tuple[str, dict[str, str]]:
        return file.url, file.headers


class File:
    """The GGUF file at an address, with its line of the SHA256SUMS beside it if there are any."""

    def __init__(self, address: WebAddress) -> None:
        self._url, self._name = address.url, address.file

    async def listing(self, client: httpx.AsyncClient) -> Listing:
        """Raises ModelRefused."""
        sums: dict[str, str] = {}
        with suppress(Gone):
            sums = read_sums(text_of(await read(client, urljoin(self._url, SUMS))))
        file = RemoteFile(self._name, self._url, None, sums.get(self._name))
        return Listing((await _headed(client, file, asyncio.Semaphore()),))

    async def locate(self, file: RemoteFile) -> tuple[str, dict[str, str]]:
        return file.url, file.headers


async def _headed(client: httpx.AsyncClient, file: RemoteFile, gate: asyncio.Semaphore) -> RemoteFile:
    """With what the server says of it. A server that knows no HEAD is asked for the file all the same."""
    try:
        async with gate:
            answer = await read(client, file.url, method="HEAD")
    except Gone as gone:
        if gone.answered in _NO_HEAD:
            return file
        raise
    etag, size = answer.headers.get("etag", ""), answer.headers.get("content-length", "")
    current = etag if etag.startswith('"') else answer.headers.get("last-modified")
    tag = file.sha256 or current
    size_bytes = as_size(int(size)) if size.isascii() and size.isdigit() else None
    if None not in (size_bytes, file.size_bytes) and size_bytes != file.size_bytes:
        raise ModelRefused(f"{file.name} has {size_bytes} bytes, its index says {file.size_bytes}")
    headers = {"If-Range": current} if current else {}
    return replace(file, size_bytes=size_bytes or file.size_bytes, tag=tag, headers=headers)


def _entries(index: Any) -> list[RemoteFile]:
    """Of `{"files": [{"name", "size", "sha256"}]}`, of such a list alone, and of what nginx writes as JSON."""
    listed = index.get("files") if isinstance(index, dict) else index
    if not isinstance(listed, list):
        raise ModelRefused('the folder\'s index has no files; expected {"files": [{"name", "size", "sha256"}]}')
    entries = []
    for each in listed:
        entry = {"name": each} if isinstance(each, str) else each
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name:
            raise ModelRefused("an entry of the folder's index has no name")
        size_bytes, sha256 = as_size(entry.get("size")), entry.get("sha256")
        if sha256 is not None and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
            raise ModelRefused(f"{name}: the folder's index has {str(sha256)[:80]!r} for its sha256")
        if entry.get("type", "file") == "file":
            entries.append(RemoteFile(name, "", size_bytes, sha256.lower() if sha256 else None))
    return entries


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _links(page: str, folder: str) -> list[RemoteFile]:
    """The files to which the page links that lie in the folder itself; pages link to other places, too."""
    parser = _Links()
    parser.feed(page)
    names: dict[str, None] = {}
    for link in parser.found:
        try:
            url = urljoin(folder, urlsplit(link)._replace(query="", fragment="").geturl())
        except ValueError:
            continue
        name = unquote(url.removeprefix(folder))
        if url.startswith(folder) and name and "/" not in name:
            names[name] = None
    return [RemoteFile(name, "") for name in names]
