"""A checkpoint that lies elsewhere: looked at first, which takes its small files, and fetched when it is wanted."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx
from msgspec.structs import replace

from aegis.core.errors import ModelRefused
from aegis.models.cache import locked
from aegis.models.checkpoint import Checkpoint, gguf_bytes, open_checkpoint, open_gguf_checkpoint
from aegis.models.disk_cache import use
from aegis.models.place import FETCH_S, LOCK_S, Looked, Report
from aegis.models.remote.address import Address, BucketAddress, HubAddress, WebAddress, parse
from aegis.models.remote.download import Download
from aegis.models.remote.gguf_look import look
from aegis.models.remote.http import Away, new_client, read_part
from aegis.models.remote.listing import CONFIG, INDEX, Listing, RemoteFile, beside_weights, gguf_in, weights
from aegis.models.remote.stored import Stored

_MIB = 1 << 20


class Registry(Protocol):
    """Where the files are."""

    async def listing(self, client: httpx.AsyncClient) -> Listing:
        """Raises ModelRefused, and Away where it may work later."""
        ...

    async def locate(self, file: RemoteFile) -> tuple[str, dict[str, str]]: ...


class RemoteCheckpoint:
    """One source, in the cache that all processes share."""

    def __init__(self, source: str, cache_dir: Path, report: Report) -> None:
        self._address = parse(source)
        self._cache_dir = cache_dir
        self._source = source
        self._report = report
        self._small: tuple[RemoteFile, ...] = ()
        self._weights: tuple[RemoteFile, ...] = ()
        self._away: Away | None = None

    @property
    def entry(self) -> Path:
        return Stored(self._cache_dir, self._source).directory

    def look(self) -> Looked:
        """Lists it and fetches what lies beside the weights. A source that is away is taken to have what it had."""
        with self._locked() as stored:
            try:
                if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") and isinstance(self._address, HubAddress):
                    raise Away("the hub is not asked, for HF_HUB_OFFLINE is set, and it was not fetched before")
                asyncio.run(self._list(stored))
            except Away as away:
                if not self._remembered(stored):
                    raise
                self._away = away
            return self._looked(stored)

    def fetch(self) -> Looked:
        """What came until it is refused stays for the next time."""
        with self._locked() as stored:
            if self._away and not all(stored.has(file) for file in (*self._small, *self._weights)):
                raise self._away
            asyncio.run(self._download(_registry(self._address), stored, [*self._small, *self._weights]))
            open_checkpoint(stored.files / self._weights[0].name if self._address.file else stored.files)
            use(self.entry)
            digests = tuple(stored.record.kept[file.name].sha256 for file in self._own_weights_first)
            return replace(self._looked(stored), digests=digests, missing_bytes=0)

    @contextmanager
    def _locked(self) -> Iterator[Stored]:
        self._report("waiting for whoever fetches it, too", LOCK_S)
        with locked(self.entry):
            yield Stored(self._cache_dir, self._source)

    async def _list(self, stored: Stored) -> None:
        self._report("listing its files", FETCH_S)
        registry = _registry(self._address)
        async with new_client() as client:
            listing = await registry.listing(client)
            if self._address.file:
                file = gguf_in(listing, self._address.file)
                await self._look_at(registry, stored, client, file)
                self._small, self._weights = (), (file,)
            else:
                self._small = tuple(beside_weights(listing))
                await self._download(registry, stored, self._small, client)
                index = _read(stored.files / INDEX) if listing.named(INDEX) else None
                self._weights = tuple(sorted(weights(listing, index), key=lambda file: file.name))
        for file in self._weights:
            _refuse_without_size(file)
        stored.record.revision = listing.revision
        stored.record.small = [file.name for file in self._small]
        stored.record.weights = [file.name for file in self._weights]
        stored.record.listed = {file.name: file.tag for file in (*self._small, *self._weights)}
        stored.only(stored.record.listed)
        stored.write()

    async def _look_at(self, registry: Registry, stored: Stored, client: httpx.AsyncClient, file: RemoteFile) -> None:
        """The header of a GGUF file, unless it was looked at before and is the same still."""
        size_bytes = _refuse_without_size(file)
        if stored.header.is_file() and file.tag is not None and file.tag == stored.record.looked_at:
            return
        self._report("reading its header", FETCH_S)

        async def part(start: int, stop: int) -> bytes:
            url, headers = await registry.locate(file)
            return await read_part(client, url, headers, start=start, stop=stop)

        try:
            await look(stored.header, size_bytes, part)
        except OSError as error:
            raise ModelRefused(f"{stored.directory} cannot be written: {error.strerror or error}") from error
        stored.record.looked_at = file.tag

    def _remembered(self, stored: Stored) -> bool:
        """Whether it was fetched before, as a whole: of an update that was only looked at the weights are missing, and
        those of the same name belong to other small files."""
        record, names = stored.record, [*stored.record.small, *stored.record.weights]
        if not record.weights or any(name not in record.kept for name in names):
            return False
        known = {name: record.kept[name] for name in names}
        if record.listed is not None and record.listed != {name: kept.tag for name, kept in known.items()}:
            return False
        files = {name: RemoteFile(name, "", kept.size_bytes, kept.sha256, kept.tag) for name, kept in known.items()}
        self._small = tuple(files[name] for name in record.small)
        self._weights = tuple(files[name] for name in record.weights)
        return all(stored.has(file) for file in self._small)

    def _looked(self, stored: Stored) -> Looked:
        checkpoint = self._checkpoint(stored)
        digests = [file.sha256 or stored.sha256(file) for file in self._own_weights_first]
        missing = sum((file.size_bytes or 0) for file in self._weights if not stored.has(file))
        missing -= sum(stored.have_bytes(file) for file in self._weights)
        weights_bytes = sum(file.size_bytes or 0 for file in self._weights)
        if checkpoint.gguf:
            weights_bytes = gguf_bytes(checkpoint.gguf, weights_bytes)
        return Looked(checkpoint, weights_bytes, True, tuple(digests) if all(digests) else (), max(0, missing))

    def _checkpoint(self, stored: Stored) -> Checkpoint:
        """The checkpoint as far as it is here: its weights may not be."""
        own = tuple(stored.files / file.name for file in self._own_weights)
        if self._address.file:
            return open_gguf_checkpoint(own[0] if own[0].is_file() else stored.header, own[0])
        config = _read(stored.files / CONFIG)
        if not isinstance(config, dict):
            raise ModelRefused(f"{CONFIG}: expected a JSON object")
        return Checkpoint(stored.files, config, own)

    @property
    def _own_weights(self) -> list[RemoteFile]:
        """The files of the transformer's weights, without the modules of sentence-transformers behind it."""
        return [file for file in self._weights if "/" not in file.name]

    @property
    def _own_weights_first(self) -> list[RemoteFile]:
        """And those of such modules."""
        return sorted(self._weights, key=lambda file: "/" in file.name)

    async def _download(
        self, registry: Registry, stored: Stored, files: Any, client: httpx.AsyncClient | None = None
    ) -> None:
        def report(have_bytes: int, of_bytes: int) -> None:
            self._report(f"fetching, {have_bytes / _MIB:.0f} of {of_bytes / _MIB:.0f} MiB", FETCH_S)

        if client:
            await Download(registry, stored, client, report).run(files)
            return
        async with new_client() as own:
            await Download(registry, stored, own, report).run(files)


def _registry(address: Address) -> Registry:
    match address:
        case HubAddress():
            from aegis.models.remote.hub import Hub

            return Hub(address)
        case WebAddress() if address.file:
            from aegis.models.remote.web import File

            return File(address)
        case WebAddress(url) if url.endswith(".tar"):
            from aegis.models.remote.tar import Tar

            return Tar(address)
        case WebAddress():
            from aegis.models.remote.web import Folder

            return Folder(address)
        case BucketAddress():
            from aegis.models.remote.bucket import Bucket

            return Bucket(address)


def _refuse_without_size(file: RemoteFile) -> int:
    if file.size_bytes is None:
        raise ModelRefused(f"{file.name}: its source does not say how large it is")
    return file.size_bytes


def _read(file: Path) -> Any:
    """Raises ModelRefused."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError):
        raise ModelRefused(f"{file.name}: not readable as JSON") from None
