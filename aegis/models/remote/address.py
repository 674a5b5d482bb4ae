"""The addresses of checkpoints elsewhere: `hf://org/name@revision`, `https://host/folder`, `s3://bucket/prefix`."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from aegis.core.errors import UserError

_REMOTE = re.compile(r"(hf|https?|s3)://", re.IGNORECASE)
_HUB = re.compile(r"([\w-][\w.-]*(?:/[\w-][\w.-]*)?)(?:@([\w][\w./-]*))?", re.ASCII)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class HubAddress(Struct, frozen=True):
    repository: str
    revision: str = "main"


class WebAddress(Struct, frozen=True):
    """A folder, an index of one as JSON, or a tar."""

    url: str


class BucketAddress(Struct, frozen=True):
    bucket: str
    prefix: str


Address = HubAddress | WebAddress | BucketAddress


def is_remote(text: str) -> bool:
    return _REMOTE.match(text) is not None


def parse(text: str) -> Address:
    """Raises UserError."""
    scheme, _, rest = text.partition("://")
    match scheme.lower():
        case "hf":
            found = _HUB.fullmatch(rest)
            if not found or ".." in rest:
                raise UserError(f"{_shown(text)}: expected hf://org/name or hf://org/name@revision")
            return HubAddress(found[1], found[2] or "main")
        case "s3":
            bucket, _, prefix = rest.partition("/")
            if not _BUCKET.fullmatch(bucket):
                raise UserError(f"{_shown(text)}: expected s3://bucket/prefix")
            return BucketAddress(bucket, prefix.strip("/"))
        case _:
            return _web(text)


def name_of(address: Address) -> str:
    """The name that clients use unless the user gives another."""
    match address:
        case HubAddress(repository):
            return repository
        case BucketAddress(bucket, prefix):
            return prefix.rpartition("/")[2] or bucket
        case WebAddress(url):
            parts = urlsplit(url)
            last = unquote(parts.path).rstrip("/").rpartition("/")[2]
            return re.sub(r"\.(tar|json)$", "", last) or parts.netloc


def _web(text: str) -> WebAddress:
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host, parts = None, urlsplit("")
    if not host or parts.scheme not in ("http", "https"):
        forms = "hf://org/name@revision, https://host/folder, https://host/file.tar or s3://bucket/prefix"
        raise UserError(f"{_shown(text)}: expected {forms}")
    if parts.username is not None or parts.query or parts.fragment:  # an address is shown to clients, and logged
        raise UserError(f"https://{host}/…: an address may hold no user, password or query; put the files elsewhere")
    return WebAddress(text)


def _shown(text: str) -> str:
    return (text if text.isprintable() else repr(text))[:300]
