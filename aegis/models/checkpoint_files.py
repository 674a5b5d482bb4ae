"""Which files of a checkpoint may be opened at all: what somebody else wrote may be anything, and without end."""

from __future__ import annotations

import stat
from pathlib import Path

from aegis.core.errors import ModelRefused

JSON_BYTES_MAX = 64 << 20
TOKENIZER_BYTES_MAX = 512 << 20
_TOKENIZERS = ("tokenizer.json", "vocab.json")
_BESIDE_WEIGHTS = (".jinja", ".json", ".model", ".py", ".txt")


def refuse_odd_files(directory: Path) -> None:
    """Raises ModelRefused where an entry is neither a file nor a directory, wherever links lead, or a file beside the
    weights is too large. Opens none."""
    for entry in sorted(directory.iterdir()):
        try:
            found = entry.stat()
        except OSError as error:
            raise ModelRefused(f"{entry.name}: {error.strerror}") from None
        if stat.S_ISDIR(found.st_mode):
            continue
        if not stat.S_ISREG(found.st_mode):
            raise ModelRefused(f"{entry.name} is no file; take it out of the directory")
        if entry.suffix in _BESIDE_WEIGHTS:
            most = TOKENIZER_BYTES_MAX if entry.name in _TOKENIZERS or entry.suffix == ".model" else JSON_BYTES_MAX
            if found.st_size > most:
                raise ModelRefused(f"{entry.name} has {found.st_size >> 20} MiB, at most {most >> 20} are read")
