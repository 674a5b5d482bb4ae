"""Where a checkpoint is, and what is known of it before its weights are there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from aegis.models.checkpoint import Checkpoint

FETCH_S = 600.0
LOCK_S = 3600.0

Report = Callable[[str, float], None]
"""Receives one line on the present work, and the time that it may take until the next line, in seconds."""


class Looked(Struct, frozen=True):
    """`digests` are those of its weights' files, and then of other modules', where it is `fetched` and they are known;
    `missing_bytes` of the weights are not here yet."""

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
