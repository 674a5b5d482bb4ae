"""Checkpoints in a tar behind a web server: its headers are read where they are, so only the files that are needed are
fetched, each as a part of the tar, which is never on disk itself."""

from __future__ import annotations

import asyncio
import io
import struct
import tarfile
from typing import IO, cast

import httpx
from msgspec.structs import replace

from aegis.core.errors import ModelRefused
from aegis.models.failures import LIBRARY_ERRORS
from aegis.models.remote.address import WebAddress
from aegis.models.remote.http import BUSY, Away, begins_at, host_of, other_part, why
from aegis.models.remote.listing import CONFIG, FILES_MAX, SUMS, Listing, RemoteFile, read_sums, refuse_climbing

_BLOCK_BYTES = 1 << 16
_SUMS_BYTES_MAX = 1 << 20
_HEADER_BYTES_MAX = _SUMS_BYTES_MAX + tarfile.RECORDSIZE
_BLOCKS_MAX = 4 * FILES_MAX
"""Of headers, two of which may belong to a file, each at the end of a block."""


class Tar:
    """The members of the tar at an address, and where each of them is in it."""

    def __init__(self, address: WebAddress) -> None:
        self._url = address.url

    async def listing(self, client: httpx.AsyncClient) -> Listing:
        """Raises ModelRefused."""
        return Listing(tuple(await asyncio.to_thread(self._members)))

    async def locate(self, file: RemoteFile) -> tuple[str, dict[str, str]]:
        return file.url, file.headers

    def _members(self) -> list[RemoteFile]:
        try:
            with httpx.Client(follow_redirects=True, timeout=30.0, headers={"Accept-Encoding": "identity"}) as client:
                remote = _RangeReader(client, self._url)
                with tarfile.open(fileobj=cast(IO[bytes], remote), mode="r:") as tar:
                    found = [self._file(member, remote.tag) for member in _regular(tar)]
                    sums = _sums(tar)
        except httpx.HTTPError as error:
            raise Away(f"{host_of(self._url)} cannot be reached ({why(error)}); try again later") from None
        except (tarfile.TarError, struct.error, RecursionError, *LIBRARY_ERRORS) as error:
            raise ModelRefused(f"it is not a tar that can be read ({why(error)})") from None
        return [replace(file, sha256=sums.get(file.name)) for file in _within(found)]

    def _file(self, member: tarfile.TarInfo, tag: str | None) -> RemoteFile:
        """A file of the tar. Its place is part of its tag, since the server's tag is that of the whole tar."""
        own = f"{tag} {member.offset_data}" if tag else None
        headers = {"If-Range": tag} if tag and tag.startswith('"') else {}
        name = member.name.removeprefix("./")
        return RemoteFile(name, self._url, member.size, None, own, member.offset_data, headers)


def _regular(tar: tarfile.TarFile) -> list[tarfile.TarInfo]:
    """Links and devices lead elsewhere, and are not looked at."""
    members: list[tarfile.TarInfo] = []
    for count, member in enumerate(tar):
        if member.isreg() and not member.issparse():
            members.append(member)
        if member.size < 0:  # behind which the same headers would come again
            raise ModelRefused("it is not a tar that can be read (a file in it has a negative size)")
        if count >= FILES_MAX:
            raise ModelRefused(f"it has more than {FILES_MAX} files")
    refuse_climbing(member.name for member in members)
    return members


def _within(files: list[RemoteFile]) -> list[RemoteFile]:
    """The files by their names within the checkpoint's directory, which is often the only one of the tar."""
    directories = (file.name.rpartition("/") for file in files)
    home = min(("".join(at[:2]) for at in directories if at[2] == CONFIG), key=len, default="")
    return [replace(file, name=file.name[len(home) :]) for file in files if file.name.startswith(home)]


def _sums(tar: tarfile.TarFile) -> dict[str, str]:
    member = next((each for each in tar.getmembers() if each.name.rpartition("/")[2] == SUMS and each.isreg()), None)
    if member is None or member.size > _SUMS_BYTES_MAX:
        return {}
    opened = tar.extractfile(member)
    return read_sums(opened.read().decode("utf-8", "replace")) if opened else {}


class _RangeReader(io.RawIOBase):
    """A file on a web server as one to seek in; what is passed over is not fetched."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client = client
        self._url = url
        self._at = 0
        self._block, self._block_at = b"", 0
        self._blocks = 0
        self.tag: str | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            raise OSError("its end is not known")
        self._at = offset if whence == io.SEEK_SET else self._at + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        if size > _HEADER_BYTES_MAX:
            raise ModelRefused(f"a header of the tar has {size} bytes, at most {_HEADER_BYTES_MAX} are read")
        parts = []
        while size > 0:
            begin = self._at - self._block_at
            if not 0 <= begin < len(self._block):
                self._fetch()
                begin = 0
            part = self._block[begin : begin + size]
            if not part:
                break
            parts.append(part)
            self._at += len(part)
            size -= len(part)
        return b"".join(parts)

    def _fetch(self) -> None:
        """The block at which it is; empty at the end. Raises ModelRefused."""
        self._blocks += 1
        if self._blocks > _BLOCKS_MAX or self._at < 0:
            raise ModelRefused("the headers of the tar have no end, or lead out of it")
        last = self._at + _BLOCK_BYTES - 1
        with self._client.stream("GET", self._url, headers={"Range": f"bytes={self._at}-{last}"}) as answer:
            if answer.status_code == 416:
                self._block, self._block_at = b"", self._at
                return
            if answer.status_code == httpx.codes.OK:
                raise ModelRefused(f"{host_of(self._url)} sends no parts of files, which a tar needs; unpack it there")
            if answer.status_code in BUSY:
                raise Away(f"{host_of(self._url)} answers {answer.status_code}; try again later")
            if answer.status_code != httpx.codes.PARTIAL_CONTENT:
                raise ModelRefused(
                    f"{host_of(self._url)} answers {answer.status_code} to GET {httpx.URL(self._url).path}"
                )
            if begins_at(answer, self._at) != self._at:
                raise other_part(self._url)
            self.tag = answer.headers.get("etag") or answer.headers.get("last-modified")
            self._block, self._block_at = _first_of(answer), self._at


def _first_of(answer: httpx.Response) -> bytes:
    """A block of what comes, of which there may be any more."""
    block = bytearray()
    for chunk in answer.iter_raw():
        block += chunk
        if len(block) >= _BLOCK_BYTES:
            break
    return bytes(block[:_BLOCK_BYTES])
