"""Checkpoints of the Hugging Face Hub, or of a mirror that answers as it does (`HF_ENDPOINT`)."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import quote

import httpx

from aegis.core.errors import ModelRefused
from aegis.models.remote.address import HubAddress
from aegis.models.remote.http import Gone, as_json, host_of, read
from aegis.models.remote.listing import FILES_MAX, Listing, RemoteFile, as_size

_ENDPOINT = "https://huggingface.co"


class Hub:
    """One repository at one revision. The token goes to the endpoint alone: httpx drops it where it is redirected to
    another host."""

    def __init__(self, address: HubAddress) -> None:
        self._address = address
        self._endpoint = (os.environ.get("HF_ENDPOINT") or _ENDPOINT).rstrip("/")

    async def listing(self, client: httpx.AsyncClient) -> Listing:
        """Raises ModelRefused."""
        repository, revision = self._address.repository, quote(self._address.revision, safe="")
        base = f"{self._endpoint}/api/models/{quote(repository)}"
        try:
            found = as_json(await read(client, f"{base}/revision/{revision}", self.headers()), "the hub's answer")
            commit = found.get("sha") if isinstance(found, dict) else None
            if not isinstance(commit, str) or not commit.isalnum():
                raise ModelRefused(f"{host_of(self._endpoint)} does not say which commit {self._address.revision} is")
            entries = await self._tree(client, f"{base}/tree/{commit}?recursive=true")
        except Gone as gone:
            raise self._why(gone) from None
        files = [self._file(entry, commit) for entry in entries if entry.get("type") == "file"]
        return Listing(tuple(files), commit)

    async def locate(self, file: RemoteFile) -> tuple[str, dict[str, str]]:
        return file.url, self.headers()

    def headers(self) -> dict[str, str]:
        from huggingface_hub import get_token  # HF_TOKEN, or what `hf auth login` has kept

        token = get_token()
        return {"Authorization": f"Bearer {token}"} if token else {}

    async def _tree(self, client: httpx.AsyncClient, url: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        while url:
            page = await read(client, url, self.headers())
            found = as_json(page, "the hub's list of files")
            if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
                raise ModelRefused("the hub's list of files is none")
            entries += found
            if len(entries) > FILES_MAX:
                raise ModelRefused(f"it has more than {FILES_MAX} files")
            url = str(page.links.get("next", {}).get("url") or "")
            if url and host_of(url) != host_of(self._endpoint):
                raise ModelRefused("the hub's list of files goes on at another host")
        return entries

    def _file(self, entry: dict[str, Any], commit: str) -> RemoteFile:
        """Git names a small file by its sha1, and a large one by what LFS has for it, its sha256."""
        name, lfs = str(entry.get("path")), entry.get("lfs")
        digest = lfs.get("oid") if isinstance(lfs, dict) else None
        sha256 = digest.removeprefix("sha256:").lower() if isinstance(digest, str) else None
        return RemoteFile(
            name,
            f"{self._endpoint}/{quote(self._address.repository)}/resolve/{commit}/{quote(name)}",
            as_size(entry.get("size")),
            sha256,
            sha256 or f"git:{entry.get('oid')}",
        )

    def _why(self, gone: Gone) -> ModelRefused:
        host = host_of(self._endpoint)
        if gone.answered in (401, 403):
            return ModelRefused(f"{host} answers {gone.answered}: set HF_TOKEN to a token that may read it")
        if gone.answered == 404:
            revision = self._address.revision
            return ModelRefused(f"{host} has no such model at revision {revision}, or HF_TOKEN may not see it")
        return gone
