"""The addresses of checkpoints elsewhere: `hf://org/name@revision`, `https://host/folder`, `s3://bucket/prefix`; and of
GGUF files in such places: `hf://org/name/file.gguf@revision`, `https://host/file.gguf`, `s3://bucket/prefix/file.gguf`."""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from aegis.core.errors import UserError

_GGUF = ".gguf"
_REMOTE = re.compile(r"(hf|https?|s3)://", re.IGNORECASE)
_LOCAL = re.compile(r"file:(?://[^/]*)?(/.*)?", re.IGNORECASE | re.DOTALL)
_HUB = re.compile(r"([\w-][\w.-]*(?:/[\w-][\w.-]*)?)(?:@([\w][\w./-]*))?", re.ASCII)
_HUB_FILE = re.compile(
    r"([\w-][\w.-]*/[\w-][\w.-]*)/((?:[\w-][\w.-]*/)*[\w-][\w.-]*\.gguf)(?:@([\w][\w./-]*))?", re.ASCII
)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class HubAddress(Struct, frozen=True):
    """If it names a GGUF `file`, that is the checkpoint."""

    repository: str
    revision: str = "main"
    file: str = ""


class WebAddress(Struct, frozen=True):
    """A folder, an index of one as JSON, a tar, or a GGUF file."""

    url: str

    @property
    def file(self) -> str:
        path = urlsplit(self.url).path
        return unquote(path).rpartition("/")[2] if path.endswith(_GGUF) else ""


class BucketAddress(Struct, frozen=True):
    """If it names a GGUF `file`, that is the checkpoint, below the prefix."""

    bucket: str
    prefix: str
    file: str = ""


Address = HubAddress | WebAddress | BucketAddress


def is_remote(text: str) -> bool:
    return _REMOTE.match(text) is not None


def parse(text: str) -> Address:
    """Raises UserError."""
    if local := _LOCAL.fullmatch(text):
        path = _shown(local[1] or "/models")
        raise UserError(f"{_shown(text)}: name what is on this machine by its path alone, like {path}")
    scheme, _, rest = text.partition("://")
    match scheme.lower():
        case "hf":
            if (named := _HUB_FILE.fullmatch(rest)) and ".." not in rest:
                return HubAddress(named[1], named[3] or "main", named[2])
            found = _HUB.fullmatch(rest)
            if not found or ".." in rest:
                forms = "hf://org/name, hf://org/name@revision or hf://org/name/file.gguf@revision"
                raise UserError(f"{_shown(text)}: expected {forms}")
            return HubAddress(found[1], found[2] or "main")
        case "s3":
            bucket, _, prefix = rest.partition("/")
            if not _BUCKET.fullmatch(bucket):
                raise UserError(f"{_shown(text)}: expected s3://bucket/prefix")
            if prefix.endswith(_GGUF):
                prefix, _, file = prefix.strip("/").rpartition("/")
                return BucketAddress(bucket, prefix, file)
            return BucketAddress(bucket, prefix.strip("/"))
        case _:
            return _web(text)


def name_of(address: Address) -> str:
    """The name that clients use unless the user gives another."""
    if address.file:
        return address.file.rpartition("/")[2].removesuffix(_GGUF)
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
        forms = "hf://org/name@revision, https://host/folder, https://host/file.tar, https://host/file.gguf or s3://bucket/prefix"
        raise UserError(f"{_shown(text)}: expected {forms}")
    if parts.username is not None or parts.query or parts.fragment:  # an address is shown to clients, and logged
        raise UserError(f"https://{host}/…: an address may hold no user, password or query; put the files elsewhere")
    if not all(0 < len(label) < 64 for label in host.removesuffix(".").split(".")):
        raise UserError(f"{_shown(text)}: no host can be named {_shown(host)!r}")
    return WebAddress(text)


def _shown(text: str) -> str:
    return (text if text.isprintable() else repr(text))[:300]
