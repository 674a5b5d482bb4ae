"""Which files of a checkpoint may be opened at all: what somebody else wrote may be anything, and without end."""

from __future__ import annotations

import stat
from pathlib import Path

from aegis.core.errors import ModelRefused

JSON_BYTES_MAX = 64 << 20
TOKENIZER_BYTES_MAX = 512 << 20
_TOKENIZERS = ("tokenizer.json", "vocab.json")
_VOCABULARIES = (".bpe", ".model", ".spm", ".tiktoken", ".vocab")
_BESIDE_WEIGHTS = (".jinja", ".json", ".py", ".txt", *_VOCABULARIES)
_TEMPLATES = "additional_chat_templates"
"""The one directory of a checkpoint that transformers looks into."""


def refuse_odd_files(directory: Path) -> None:
    """Raises ModelRefused where an entry is neither a file nor a directory, wherever links lead, or a file beside the
    weights is too large. Opens none."""
    within = directory / _TEMPLATES
    entries = [*directory.iterdir(), *(within.iterdir() if within.is_dir() else ())]
    for entry in sorted(entries):
        _refuse_odd(entry, str(entry.relative_to(directory)))


def _refuse_odd(entry: Path, name: str) -> None:
    try:
        found = entry.stat()
    except FileNotFoundError:  # a link to nothing, which nobody can open
        return
    except OSError as error:
        raise ModelRefused(f"{name}: {error.strerror}") from None
    if stat.S_ISDIR(found.st_mode):
        return
    if not stat.S_ISREG(found.st_mode):
        raise ModelRefused(f"{name} is no file; take it out of the directory")
    if entry.suffix in _BESIDE_WEIGHTS:
        large = entry.name in _TOKENIZERS or entry.suffix in _VOCABULARIES
        most = TOKENIZER_BYTES_MAX if large else JSON_BYTES_MAX
        if found.st_size > most:
            raise ModelRefused(f"{name} has {found.st_size >> 20} MiB, at most {most >> 20} are read")
