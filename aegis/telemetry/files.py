"""Files of spans, records and decisions: a JSON value a line, gzipped where the name ends in `.gz`.

The same content is the same bytes. A span is an array of its fields, the others are objects.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from aegis.config.paths import refuse_device
from aegis.core.decision import Decision
from aegis.core.errors import UserError
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span

_Line = TypeVar("_Line", bound=Struct)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # the last of what is nested deeply


def write(file: Path, lines: Iterable[Struct]) -> None:
    """Spans, records or decisions. Raises UserError."""
    write_bytes(file, msgspec.json.Encoder().encode_lines(list(lines)))


def read_spans(file: Path) -> list[Span]:
    """Raises UserError: one line with the file and the line that is no span."""
    return parse(read_bytes(file), Span, str(file))


def read_records(file: Path) -> list[Record]:
    """Raises UserError: one line with the file and the line that is no record."""
    return parse(read_bytes(file), Record, str(file))


def read_decisions(file: Path) -> list[Decision]:
    """Raises UserError: one line with the file and the line that is no decision."""
    return parse(read_bytes(file), Decision, str(file))


def parse(content: bytes, kind: type[_Line], source: str) -> list[_Line]:
    """A `kind` of each line. Raises UserError, with `source` and the number of the line."""
    try:
        return msgspec.json.Decoder(kind).decode_lines(content)
    except _UNREADABLE:
        return list(_one_by_one(content, kind, source))


def write_bytes(file: Path, content: bytes) -> None:
    """Raises UserError."""
    try:
        file.write_bytes(gzip.compress(content, mtime=0) if file.suffix == ".gz" else content)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None


def read_bytes(file: Path) -> bytes:
    """Raises UserError."""
    try:
        refuse_device(file)
        content = file.read_bytes()
        return gzip.decompress(content) if file.suffix == ".gz" else content
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise UserError(f"{file}: is no whole gzip file") from None
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None


def _one_by_one(content: bytes, kind: type[_Line], source: str) -> Iterable[_Line]:
    decoder = msgspec.json.Decoder(kind)
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            try:
                yield decoder.decode(line)
            except _UNREADABLE as error:
                raise UserError(f"{source}:{number}: is no {kind.__name__.lower()}: {error}") from None
