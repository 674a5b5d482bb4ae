"""The cache on disk kept within a bound: fetched checkpoints and weight images, of which those longest unused leave.

Processes share it. Who needs an entry holds it with a lock that the system releases if the process dies; a held entry
stays, and so does one that another process is writing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, cast

import msgspec
from msgspec import Struct

from aegis.core.errors import ModelRefused
from aegis.models.cache import lock_file, locked

_MIB = 1 << 20
_STORES = ("checkpoints", "images")
_WEIGHTS = (".gguf", ".safetensors")


class Entry(Struct, frozen=True):
    path: Path
    nbytes: int
    used_ns: int


class _Promise(Struct, frozen=True):
    """So many bytes will be written, most of them to `entry` of the cache, which `had_bytes` when it was promised."""

    nbytes: int
    entry: str | None
    had_bytes: int

    def left_bytes(self) -> int:
        written = _bytes_of(Path(self.entry)) - self.had_bytes if self.entry else 0
        return max(0, self.nbytes - max(0, written))


class DiskCache:
    """`limit_bytes` for all entries together, or None: they stay for ever."""

    def __init__(self, cache_dir: Path, limit_bytes: int | None) -> None:
        self._cache_dir = cache_dir
        self._limit_bytes = limit_bytes

    @contextmanager
    def room(self, nbytes: int, entry: Path | None = None) -> Iterator[None]:
        """For so many more bytes, of which nobody else gets any while the block lasts; `entry` is where most of them
        go, and stays. Raises ModelRefused, with nothing evicted, where they would not fit even into an empty cache;
        else when the others may not leave."""
        if self._limit_bytes is None:
            yield
            return
        if nbytes > self._limit_bytes:
            raise ModelRefused(
                f"it takes {nbytes / _MIB:.0f} MiB on disk, fetched and as an image, and the cache holds "
                f"{self._limit_bytes / _MIB:.0f} MiB; raise --cache-size"
            )
        with locked(self._cache_dir / "room"):
            taken = self._evict(nbytes, [entry] if entry else [])
            if taken + nbytes > self._limit_bytes:
                raise ModelRefused(
                    f"it takes {nbytes / _MIB:.0f} MiB more on disk, and of the cache's "
                    f"{self._limit_bytes / _MIB:.0f} MiB {taken / _MIB:.0f} MiB may not leave; raise --cache-size, or "
                    "register models with lazy: true"
                )
            promise = self._promise(_Promise(nbytes, str(entry) if entry else None, _bytes_of(entry) if entry else 0))
        with promise:
            yield
            Path(promise.name).unlink(missing_ok=True)

    def trim(self, keep: Collection[Path]) -> None:
        """An image may be larger than was promised: what may leave for that leaves."""
        if self._limit_bytes is not None:
            with locked(self._cache_dir / "room"):
                self._evict(0, keep)

    def _evict(self, nbytes: int, keep: Collection[Path]) -> int:
        """The bytes that are taken or promised after as many left as had to, and could."""
        assert self._limit_bytes is not None
        entries = sorted(self.entries(), key=lambda entry: (entry.used_ns, entry.path))
        taken = sum(entry.nbytes for entry in entries) + self._promised_bytes()
        for entry in entries:
            if taken + nbytes <= self._limit_bytes:
                break
            if entry.path not in keep and evict(entry.path):
                taken -= entry.nbytes
        return taken

    def _promise(self, promise: _Promise) -> IO[bytes]:
        """A file whose lock says that whoever promised it lives."""
        directory = self._cache_dir / "promises"
        directory.mkdir(parents=True, exist_ok=True)
        file = NamedTemporaryFile(dir=directory, delete=False)  # noqa: SIM115 - the caller closes it
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(msgspec.json.encode(promise))
        file.flush()
        return cast(IO[bytes], file)

    def _promised_bytes(self) -> int:
        directory, promised = self._cache_dir / "promises", 0
        for file in sorted(directory.iterdir()) if directory.is_dir() else ():
            with contextlib.suppress(FileNotFoundError), only_one(file) as dead:
                if dead:
                    file.unlink(missing_ok=True)
                else:
                    promised += msgspec.json.decode(file.read_bytes(), type=_Promise).left_bytes()
        return promised

    def entries(self) -> list[Entry]:
        found = []
        for store in _STORES:
            directory = self._cache_dir / store
            for path in sorted(directory.iterdir()) if directory.is_dir() else ():
                if path.is_dir() and not path.name.startswith(".") and (nbytes := _bytes_of(path)):
                    found.append(Entry(path, nbytes, _used_ns(path)))
        return found


def use(entry: Path) -> None:
    """Notes that the entry was used now."""
    with contextlib.suppress(OSError):
        file = _held_file(entry)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


class Hold:
    """An entry that stays until `release`, or the end of this process. Where the disk refuses to say so, it is used all
    the same, and may have to be made or fetched again."""

    def __init__(self, entry: Path) -> None:
        file, self._fd = _held_file(entry), -1
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._fd, fcntl.LOCK_SH)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@contextmanager
def held(entry: Path | None) -> Iterator[None]:
    """An entry that is read meanwhile, if there is one, stays, although another process may need room."""
    hold = Hold(entry) if entry else None
    try:
        yield
    finally:
        if hold:
            hold.release()


def evict(entry: Path) -> bool:
    """Whether it left: an image as a whole, of a checkpoint what can be fetched again and is large."""
    with only_one(_held_file(entry)) as unheld, only_one(lock_file(entry)) as unlocked:
        if not (unheld and unlocked):
            return False
        if entry.parent.name == "images":
            gone = entry.with_name(f".{entry.name}.gone")
            shutil.rmtree(gone, ignore_errors=True)
            entry.rename(gone)  # nobody finds half of it
            shutil.rmtree(gone, ignore_errors=True)
        else:
            for file in _large_files(entry):
                file.unlink(missing_ok=True)
        return True


@contextmanager
def only_one(file: Path) -> Iterator[bool]:
    """Whether nobody else has its lock."""
    with file.open("a") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _large_files(checkpoint: Path) -> list[Path]:
    weights = [path for path in _within(checkpoint / "files") if path.suffix in _WEIGHTS]
    return [*weights, *_within(checkpoint / "partial")]


def _within(directory: Path) -> list[Path]:
    """All files; what leaves meanwhile is passed over."""
    return [Path(place, name) for place, _, names in os.walk(directory) for name in names]


def _bytes_of(entry: Path) -> int:
    files = _large_files(entry) if entry.parent.name == "checkpoints" else _within(entry)
    return sum(map(_nbytes, files))


def _nbytes(file: Path) -> int:
    """Another process may rename or remove it now."""
    try:
        found = file.stat()
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def _used_ns(entry: Path) -> int:
    """When it was used last, or made."""
    for file in (_held_file(entry), entry):
        with contextlib.suppress(OSError):
            return max(file.stat().st_mtime_ns, 0)
    return 0


def _held_file(entry: Path) -> Path:
    return entry.with_name(f".{entry.name}.held")
