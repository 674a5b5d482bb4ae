"""The architectures that checkpoints name, as far as files on this machine tell, for who imports them beforehand."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from aegis.models.checkpoint import SMALL_JSON_BYTES_MAX
from aegis.models.sources import Source

_CLASS = re.compile(r"[A-Z]\w*(For[A-Z]\w+|Model)", re.ASCII)


def architectures_of(sources: Iterable[Source]) -> list[str]:
    """Names of transformers' classes, or of nothing: whoever wrote the checkpoints said them. What cannot be read is
    left out; registration says what is wrong with it."""
    return sorted({name for source in sources if source.path for name in _named(Path(source.path) / "config.json")})


def _named(file: Path) -> list[str]:
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > SMALL_JSON_BYTES_MAX:  # a pipe would be read for ever
            return []
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    named = config.get("architectures") if isinstance(config, dict) else None
    return (
        [name for name in named if isinstance(name, str) and _CLASS.fullmatch(name)] if isinstance(named, list) else []
    )
