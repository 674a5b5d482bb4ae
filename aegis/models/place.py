"""Where a checkpoint is, and what is known of it before its weights are there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from aegis.models.checkpoint import Checkpoint, open_checkpoint
from aegis.models.sources import Source, fetch

FETCH_S = 600.0
LOCK_S = 3600.0

Report = Callable[[str, float], None]
"""Receives one line on the present work, and the time that it may take until the next line, in seconds."""


class Looked(Struct, frozen=True):
    """`digests` are those of its weights' files, where it is `fetched` and they are known; `missing_bytes` of the
    weights are not here yet."""

    checkpoint: Checkpoint
    weights_bytes: int
    fetched: bool = False
    digests: tuple[str, ...] = ()
    missing_bytes: int = 0


class Place(Protocol):
    @property
    def entry(self) -> Path | None:
        """What it takes of the cache on disk, if it does."""
        ...

    def look(self) -> Looked:
        """Everything but the weights is there then. Raises ModelRefused."""
        ...

    def fetch(self) -> Looked:
        """The weights, too. It was looked at before. Raises ModelRefused."""
        ...


class Directory:
    """A directory of this machine, of the user or of the hub's own cache."""

    entry = None

    def __init__(self, source: Source, report: Report) -> None:
        self._source = source
        self._report = report

    def look(self) -> Looked:
        checkpoint = open_checkpoint(fetch(self._source, lambda text: self._report(text, FETCH_S)))
        return Looked(checkpoint, checkpoint.stored_bytes)

    fetch = look


def place_of(source: Source, cache_dir: Path, report: Report) -> Place:
    """The hub's own cache is filled as a whole, so a lazy model of the hub does without it."""
    url = source.url or (f"hf://{source.hub}" if source.hub and source.lazy else None)
    if url is None:
        return Directory(source, report)
    from aegis.models.remote.checkpoint import RemoteCheckpoint

    return RemoteCheckpoint(url, cache_dir, report)
