"""A fetched checkpoint on disk: whole files in `files`, begun ones in `partial`, and a record of what they are.

The record outlives the weights: with the digests in it the image that was made of them is found without them.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from aegis.models.remote.listing import RemoteFile

_READ_BYTES = 1 << 22


class KeptFile(Struct, frozen=True):
    """`tag` is the source's, of the content that was fetched."""

    size_bytes: int
    sha256: str
    tag: str | None


class Record(Struct):
    source: str
    revision: str = ""
    small: list[str] = []
    weights: list[str] = []
    listed: dict[str, str | None] | None = None
    """The tags of `small` and `weights`, which belong together; None in a record of an earlier version."""

    kept: dict[str, KeptFile] = {}
    begun: dict[str, str | None] = {}
    """The tags of those that are partly there."""

    looked_at: str | None = None
    """The tag of the GGUF file whose header lies beside."""


def key_of(source: str) -> str:
    return hashlib.blake2b(source.encode(), digest_size=16).hexdigest()


class Stored:
    """The directory of one source. Whoever writes to it holds its lock."""

    def __init__(self, cache_dir: Path, source: str) -> None:
        self.directory = cache_dir / "checkpoints" / key_of(source)
        self.files = self.directory / "files"
        self._partial = self.directory / "partial"
        self.header = self.directory / "header.gguf"
        self.record = self._read() or Record(source)
        if self.record.source != source:
            self.record = Record(source)

    def have_bytes(self, file: RemoteFile) -> int:
        """Of a file that is partly there; what is there of another content, or of one that nobody can tell, is
        dropped."""
        begun = file.tag is not None and self.record.begun.get(file.name) == file.tag
        try:
            have = self.partial(file.name).stat().st_size
        except OSError:
            return 0
        if not begun:
            self.discard(file.name)
            return 0
        return have

    def has(self, file: RemoteFile) -> bool:
        """Whether the file is there as its source has it."""
        kept = self.known(file)
        try:
            return kept is not None and (self.files / file.name).stat().st_size == kept.size_bytes
        except OSError:
            return False

    def known(self, file: RemoteFile) -> KeptFile | None:
        """What was fetched of it, if the source has it still."""
        kept = self.record.kept.get(file.name)
        if kept is None or kept.tag is None or kept.tag != file.tag:
            return None
        return kept if file.size_bytes in (None, kept.size_bytes) and file.sha256 in (None, kept.sha256) else None

    def sha256(self, file: RemoteFile) -> str:
        """The sha256 of what was fetched of the file, if the source still has that; else empty."""
        kept = self.known(file)
        return kept.sha256 if kept else ""

    def partial(self, name: str) -> Path:
        return self._partial / name

    def begin(self, file: RemoteFile) -> None:
        """Some of it is about to be written."""
        self.partial(file.name).parent.mkdir(parents=True, exist_ok=True)
        self.record.begun[file.name] = file.tag
        self.write()

    def discard(self, name: str) -> None:
        self.partial(name).unlink(missing_ok=True)

    def keep(self, file: RemoteFile, sha256: str) -> None:
        """It is whole and right. What was listed before is whole no more where this is not part of it."""
        if self.record.weights and (self.record.listed or {}).get(file.name, "") != file.tag:
            self.record.weights = []
            self.write()  # first, for nothing may come after the file has its place
        target = self.files / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        size_bytes = self.partial(file.name).stat().st_size
        self.partial(file.name).rename(target)
        self.record.kept[file.name] = KeptFile(size_bytes, sha256, file.tag)
        self.record.begun.pop(file.name, None)
        self.write()

    def only(self, names: Iterable[str]) -> None:
        """Files of these names may stay, whole or begun; others are of an earlier state of the source."""
        wanted = set(names)
        for place in (self.files, self._partial):
            for path in [path for path in place.rglob("*") if path.is_file()]:
                if str(path.relative_to(place)) not in wanted:
                    path.unlink()
        for known in (self.record.kept, self.record.begun):
            for name in [name for name in known if name not in wanted]:
                del known[name]

    def write(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        draft = self.directory / "record.json.draft"
        draft.write_bytes(msgspec.json.encode(self.record))
        draft.replace(self.directory / "record.json")

    def _read(self) -> Record | None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode((self.directory / "record.json").read_bytes(), type=Record)
        return None


def digest_of(path: Path) -> tuple[int, str]:
    """The size and the sha256 of a file, as the disk has it."""
    digest, nbytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
            nbytes += len(chunk)
    return nbytes, digest.hexdigest()
