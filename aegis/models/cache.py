"""The cache on disk: where it is, and how several processes make one thing in it at most once and never by halves."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from aegis.config.paths import refusing
from aegis.core.errors import UserError

_ADVICE = "name a writable directory with AEGIS_CACHE"


def default_cache_dir() -> Path:
    """`$AEGIS_CACHE`, else `~/.cache/aegis`. Raises UserError where it is of a user that there is not."""
    directory = os.environ.get("AEGIS_CACHE") or "~/.cache/aegis"
    with refusing("AEGIS_CACHE", directory):
        return Path(directory).expanduser()


def made(cache_dir: Path) -> Path:
    """The directory, made if it is not there. Raises UserError where it cannot be, or cannot be written to."""
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"the cache {cache_dir} is no directory; {_ADVICE}") from None
    except OSError as error:
        raise _unmakeable(cache_dir, error) from None
    if not os.access(cache_dir, os.W_OK | os.X_OK):
        raise UserError(f"the cache {cache_dir} cannot be written to; {_ADVICE}")
    return cache_dir


def refuse_unmakeable(cache_dir: Path) -> None:
    """Raises UserError where `made` would, and leaves nothing behind."""
    there = next(each for each in (cache_dir, *cache_dir.parents) if os.path.lexists(each))
    if there == cache_dir:
        made(cache_dir)
        return
    try:
        with TemporaryDirectory(prefix=".aegis-", dir=there):  # permissions do not tell all: in /proc nothing is made
            pass
        with suppress(FileNotFoundError):
            os.lstat(cache_dir)  # or it has a name that is too long
    except OSError as error:
        raise _unmakeable(cache_dir, error) from None


def _unmakeable(cache_dir: Path, error: OSError) -> UserError:
    return UserError(f"the cache {cache_dir} cannot be made: {error.strerror}; {_ADVICE}")


def lock_file(target: Path) -> Path:
    """The file whose lock `locked` holds."""
    return target.with_name(f".{target.name}.lock")


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Holds the lock of `target` against all processes; the system releases it if this one dies."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(target).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yields an empty directory that becomes `target` if the block succeeds and is removed if it fails. By then all of
    it is on the disk: else a power failure could leave files of no content in what looks whole.

    The caller holds `locked(target)`; what a killed predecessor left behind is removed first.
    """
    draft = target.with_name(f".{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        yield draft
        for entry in (*draft.rglob("*"), draft):
            _sync(entry)
        shutil.rmtree(target, ignore_errors=True)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _sync(entry: Path) -> None:
    descriptor = os.open(entry, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
