"""Files of results: written whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from aegis.core.errors import UserError
from bench.common.provenance import stamped


def check(file: Path) -> None:
    """Before time is spent on what cannot be written. Raises UserError."""
    try:
        if not file.parent.is_dir():
            raise UserError(f"cannot write {file}: {file.parent} is no directory")
        if file.is_dir():
            raise UserError(f"cannot write {file}: it is a directory")
        if not any(os.access(place, os.W_OK) for place in (file, file.parent)):
            raise UserError(f"cannot write {file}: that is not allowed")
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None


def check_all(files: Iterable[Path]) -> None:
    """Those that options of one command name: two that are one file would leave what was written last. Raises
    UserError."""
    seen = set[str]()
    for file in files:
        check(file)
        place = os.path.realpath(file)
        if place in seen and (file.is_file() or not file.exists()):  # a device takes both
            raise UserError(f"cannot write {file}: two options name it; give each a file of its own")
        seen.add(place)


def make_directory(directory: Path, *, parents: bool = False) -> None:
    """Makes the directory for files to come, unless it is there. Raises UserError."""
    try:
        directory.mkdir(parents=parents, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the directory {directory}: {error.strerror}") from None


def prepare(file: Path | None) -> None:
    """A place for what is to be measured, with its directory, if any is wanted. Raises UserError."""
    if file is not None:
        make_directory(file.parent, parents=True)
        check(file)


def write(file: Path, content: bytes) -> None:
    """An end at any time, and a device that is full, leave what there was before. Raises UserError."""
    try:
        kept = file.resolve()  # what a link leads to, which stays one
        if kept.exists() and not (kept.is_file() and os.access(kept.parent, os.W_OK)):
            kept.write_bytes(content)  # a device, or one file that may be written where no other may be made
        else:
            _replace(kept, content)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None


def _replace(file: Path, content: bytes) -> None:
    part = file.with_name(f"{file.name}.part")
    try:
        part.write_bytes(content)
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def write_json(file: Path, content: Any) -> None:
    """Indented; a file of `bench/results` says which code it is of. Raises UserError."""
    write(file, msgspec.json.format(msgspec.json.encode(stamped(file, content))) + b"\n")
