"""Files of results: written whole, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from aegis.core.errors import UserError
from bench.common.provenance import stamped


def check(file: Path) -> None:
    """Before time is spent on what cannot be written. Raises UserError."""
    if not file.parent.is_dir():
        raise UserError(f"cannot write {file}: {file.parent} is no directory")
    if file.is_dir():
        raise UserError(f"cannot write {file}: it is a directory")


def make_directory(directory: Path, *, parents: bool = False) -> None:
    """For files to come, unless it is there. Raises UserError."""
    try:
        directory.mkdir(parents=parents, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the directory {directory}: {error.strerror}") from None


def write(file: Path, content: bytes) -> None:
    """Raises UserError."""
    try:
        file.write_bytes(content)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None


def write_json(file: Path, content: Any) -> None:
    """Indented; a file of `bench/results` says which code it is of. Raises UserError."""
    write(file, msgspec.json.format(msgspec.json.encode(stamped(file, content))) + b"\n")


def replace_json(file: Path, content: Any) -> None:
    """As `write_json`, and an end at any time leaves a whole file: the one before, or this one. Raises UserError."""
    part = file.with_name(f"{file.name}.part")
    write_json(part, stamped(file, content))
    try:
        part.replace(file)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None
