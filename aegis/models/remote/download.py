"""Does what `FetchCore` decides: asks servers, writes to disk, waits."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import httpx

from aegis.core.errors import ModelRefused
from aegis.models.remote.fetch_core import (
    Answered,
    Arrived,
    Ask,
    Begun,
    Discard,
    Due,
    Effect,
    Ended,
    Event,
    Failed,
    FetchCore,
    Finished,
    Hopeless,
    Keep,
    Leave,
    Lost,
    Verified,
    Verify,
    Wake,
    WantedFile,
)
from aegis.models.remote.http import BUSY, begins_at, host_of, other_part, why
from aegis.models.remote.listing import RemoteFile, is_beside_weights, refuse_too_many_small, small_bytes_max
from aegis.models.remote.stored import Stored, digest_of

_REPORT_NS = 250_000_000
_LEAST_BYTES = 1 << 20
"""Fewer are no progress: who waits for a report gives a source up that sends a byte now and then."""

_NS_PER_S = 1_000_000_000
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
_UNSATISFIABLE = 416
_CHANGED = 412

Report = Callable[[int, int], None]
"""Receives how many bytes are there, and of how many."""


class Source(Protocol):
    async def locate(self, file: RemoteFile) -> tuple[str, dict[str, str]]:
        """The address and the headers to ask for it now."""
        ...


class Download:
    """Fetches files to a `Stored` directory, whose lock the caller holds."""

    def __init__(self, source: Source, stored: Stored, client: httpx.AsyncClient, report: Report) -> None:
        self._source = source
        self._stored = stored
        self._client = client
        self._report = report
        self._reported_ns, self._reported_bytes = 0, 0
        self._small_bytes = 0
        self._unforeseen: dict[str, int] = {}
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._files: dict[str, RemoteFile] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[None]] = set()

    async def run(self, files: Sequence[RemoteFile]) -> None:
        """Returns when all are kept. Raises ModelRefused; what is there then stays."""
        missing = [file for file in files if not self._stored.has(file)]
        self._files = {file.name: file for file in missing}
        self._small_bytes = sum(self._known_bytes(file) for file in files if is_beside_weights(file.name))
        core = FetchCore(
            WantedFile(file.name, file.size_bytes, file.sha256, self._stored.have_bytes(file)) for file in missing
        )
        self._events.put_nowait(Begun())
        try:
            while not core.over:
                event = await self._events.get()
                for effect in core.on(event, time.monotonic_ns()):
                    self._do(effect)
                self._tell(core)
        except OSError as error:
            raise ModelRefused(self._not_written(error)) from error
        finally:
            for task in [*self._asking.values(), *self._others]:
                task.cancel()
            await asyncio.gather(*self._asking.values(), *self._others, return_exceptions=True)

    def _tell(self, core: FetchCore) -> None:
        now_ns = time.monotonic_ns()
        is_further = core.have_bytes - self._reported_bytes >= _LEAST_BYTES or not self._reported_ns
        if is_further and now_ns - self._reported_ns >= _REPORT_NS:
            self._reported_ns, self._reported_bytes = now_ns, core.have_bytes
            self._report(core.have_bytes, core.total_bytes)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Ask(name, start):
                self._asking[name] = asyncio.create_task(self._ask(self._files[name], start))
            case Leave(name):
                self._asking.pop(name).cancel()
            case Discard(name):
                self._stored.discard(name)
            case Verify(name):
                self._beside(self._verify(name))
            case Keep(name, sha256):
                self._stored.keep(self._files[name], sha256)
            case Wake(at_ns):
                self._beside(self._wake(at_ns))
            case Failed(reason):
                raise ModelRefused(reason)
            case Finished():
                pass

    def _beside(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._others.add(task)
        task.add_done_callback(self._others.discard)

    async def _wake(self, at_ns: int) -> None:
        await asyncio.sleep(max(0, at_ns - time.monotonic_ns()) / _NS_PER_S)
        self._events.put_nowait(Due())

    async def _verify(self, name: str) -> None:
        try:
            path = self._stored.partial(name)
            path.touch()  # one without a byte
            size_bytes, sha256 = await asyncio.to_thread(digest_of, path)
            self._events.put_nowait(Verified(name, size_bytes, sha256))
        except OSError as error:
            self._events.put_nowait(Hopeless(self._not_written(error)))

    async def _ask(self, file: RemoteFile, start: int) -> None:
        host = ""
        try:
            self._stored.begin(file)
            if file.offset is not None and not file.size_bytes:
                await self._written(Ended(file.name))  # no range has no bytes
                return
            url, headers = await self._source.locate(file)
            host = host_of(url)
            await self._receive(file, start, url, headers)
        except httpx.HTTPError as error:
            self._events.put_nowait(Lost(file.name, f"{host} is away ({why(error)})"))
        except ModelRefused as refusal:
            self._events.put_nowait(Hopeless(refusal.message))
        except OSError as error:
            self._events.put_nowait(Hopeless(self._not_written(error)))
        except Exception as error:  # noqa: BLE001 - of a library of the source: without a word from here the fetch waits
            self._events.put_nowait(Hopeless(f"{file.name}: {type(error).__name__} while it was fetched: {why(error)}"))

    async def _receive(self, file: RemoteFile, start: int, url: str, headers: dict[str, str]) -> None:
        first = (file.offset or 0) + start
        last = "" if file.offset is None else str(file.offset + (file.size_bytes or 0) - 1)
        if first or file.offset is not None:
            headers = headers | {"Range": f"bytes={first}-{last}"}
        else:
            headers = {name: value for name, value in headers.items() if name != "If-Range"}
        async with self._client.stream("GET", url, headers=headers) as response:
            code = response.status_code
            if code in BUSY:
                wait_s = response.headers.get("retry-after", "")
                wait_ns = int(wait_s) * _NS_PER_S if _NUMBER.fullmatch(wait_s) else 0
                self._events.put_nowait(Lost(file.name, f"{host_of(url)} answers {code}", wait_ns))
                return
            if code == _UNSATISFIABLE and start:
                await self._written(Answered(file.name, -1))
                return
            if code not in (httpx.codes.OK, httpx.codes.PARTIAL_CONTENT):
                changed = ", for it has changed meanwhile: try again" if code == _CHANGED else ""
                self._events.put_nowait(Hopeless(f"{file.name}: {host_of(url)} answers {code}{changed}"))
                return
            if file.offset is not None and code == httpx.codes.OK:
                raise ModelRefused(f"{host_of(url)} sends no parts of files, which a tar needs; unpack it there")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ModelRefused(f"{file.name}: {host_of(url)} sends it compressed, so its bytes are not its own")
            if code == httpx.codes.PARTIAL_CONTENT and begins_at(response, first) != first:
                raise other_part(url)
            begins = start if code == httpx.codes.PARTIAL_CONTENT else 0
            await self._write(file, begins, _size_of(file, response, begins), response)
        await self._written(Ended(file.name))

    async def _write(self, file: RemoteFile, begins: int, size_bytes: int | None, response: httpx.Response) -> None:
        await self._written(Answered(file.name, begins, size_bytes))
        path, most = self._stored.partial(file.name), small_bytes_max(file.name)
        with path.open("r+b" if path.exists() else "wb") as out:
            have = out.seek(begins)
            async for chunk in response.aiter_raw():
                have += len(chunk)
                if file.size_bytes is None:  # as of none of the weights
                    if have > most:
                        raise ModelRefused(
                            f"{file.name} has more than {most >> 20} MiB, which are the most that are read"
                        )
                    self._count(file.name, have)
                out.write(chunk)
                await self._written(Arrived(file.name, have))

    def _known_bytes(self, file: RemoteFile) -> int:
        if file.size_bytes is not None:
            return file.size_bytes
        if file.name not in self._files:
            return self._stored.record.kept[file.name].size_bytes
        self._unforeseen[file.name] = self._stored.have_bytes(file)
        return self._unforeseen[file.name]

    def _count(self, name: str, have_bytes: int) -> None:
        """Counts the bytes of a file beside the weights whose size was not listed. Raises ModelRefused."""
        self._small_bytes += have_bytes - self._unforeseen.get(name, 0)
        self._unforeseen[name] = have_bytes
        refuse_too_many_small(self._small_bytes)

    async def _written(self, event: Event) -> None:
        """Waits until the core has seen it: it may have ended this very task."""
        self._events.put_nowait(event)
        while not self._events.empty():
            await asyncio.sleep(0)

    def _not_written(self, error: OSError) -> str:
        if error.errno in _FULL:
            return f"the disk is full: {self._stored.directory} takes no more; free some, or set AEGIS_CACHE to another"
        return f"{self._stored.directory} cannot be written: {error.strerror or error}"


def _size_of(file: RemoteFile, response: httpx.Response, begins: int) -> int | None:
    """The size of the whole file, if the server tells it."""
    if file.offset is not None:
        return file.size_bytes
    _, _, whole = response.headers.get("content-range", "").rpartition("/")
    if response.status_code == httpx.codes.PARTIAL_CONTENT and _NUMBER.fullmatch(whole):
        return int(whole)
    length = response.headers.get("content-length", "")
    with contextlib.suppress(ValueError):
        return begins + int(length)
    return None
