"""Recorded arrivals: CSV with the columns `arrival_s, model, input_tokens, output_tokens`, or JSONL as `timed_trace`.

The file's name says what it is: `.csv` or `.jsonl`, either with `.gz` behind it. In both formats

* rows need not be in order; further columns and fields (such as `hash_ids`) are ignored;
* the model may be left out or empty: all such rows are of the model `m000`;
* `priority` may be, too: a whole number from -8 to 8 as in the API, 0 unless given;
* a row that made no output counts as one token, which is what serving it again makes at least.

A row that cannot be served is refused with its file and line: a time that is negative or no number, a prompt without
tokens, a name no model can have.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO
from zlib import error as ZlibError

from msgspec import DecodeError, Struct
from msgspec.json import Decoder

from aegis.config.paths import refuse_device
from aegis.core.errors import UserError
from aegis.core.ids import MODEL_NAME_PATTERN, ModelId
from aegis.core.request import PRIORITY_MAX
from bench.workloads.arrival import Arrival, in_order, model_name

COLUMNS = ("arrival_s", "model", "input_tokens", "output_tokens", "priority")
_OPTIONAL = ("model", "priority")
_AT_S_MAX = 1e9  # 30 years
_TOKENS_MAX = 1 << 40
_LINE_CHARACTERS_MAX = 64 << 20


class _Timed(Struct):
    """A line of a `timed_trace`."""

    timestamp: float
    input_length: int
    output_length: int
    model: str | None = None
    priority: int = 0


class _Rows:
    """Turns rows into arrivals; remembers the names it has checked."""

    def __init__(self) -> None:
        self._models = {"": model_name(0)}

    def arrival(self, at_s: float, model: str, input_tokens: int, output_tokens: int, priority: int) -> Arrival:
        """Raises `ValueError` with what is wrong."""
        if not 0 <= at_s <= _AT_S_MAX:
            raise ValueError(f"the request arrives at {at_s:g} s; expected 0 to {_AT_S_MAX:g}")
        if not 1 <= input_tokens <= _TOKENS_MAX:
            raise ValueError(f"the request has {input_tokens} input tokens; expected 1 or more")
        if not 0 <= output_tokens <= _TOKENS_MAX:
            raise ValueError(f"the request has {output_tokens} output tokens; expected 0 or more")
        if abs(priority) > PRIORITY_MAX:
            raise ValueError(f"the request has priority {priority}; expected {-PRIORITY_MAX} to {PRIORITY_MAX}")
        name = self._models.get(model) or self._named(model)
        return Arrival(round(at_s * 1e9), name, input_tokens, output_tokens or 1, priority)

    def _named(self, model: str) -> ModelId:
        if not re.fullmatch(MODEL_NAME_PATTERN, model):
            raise ValueError(f"{model[:200]!r} is no name of a model; expected {MODEL_NAME_PATTERN}")
        return self._models.setdefault(model, ModelId(model))


def read(path: Path, *, sec_multiplier: float = 1.0) -> list[Arrival]:
    """The arrivals of a file, in order.

    A `timestamp` of a `timed_trace` is multiplied by `sec_multiplier` to get seconds, as in `vllm bench serve`: 0.001
    for traces in milliseconds such as Mooncake's. Raises `UserError`, with file and line where a row is at fault.
    """
    with readable(path), opened(path) as file:
        match (path.with_suffix("") if path.suffix == ".gz" else path).suffix:
            case ".csv":
                arrivals = in_order(_csv(path, file))
            case ".jsonl":
                arrivals = in_order(_jsonl(path, file, sec_multiplier))
            case _:
                raise UserError(f"{path}: expected a trace whose name ends in .csv, .csv.gz, .jsonl or .jsonl.gz")
    if not arrivals:
        raise UserError(f"{path}: the trace holds no requests")
    return arrivals


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns what goes wrong with a file into a UserError that names it."""
    try:
        yield
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a text file in UTF-8") from error
    except (EOFError, ZlibError) as error:
        raise UserError(f"{path}: the gzip file is damaged") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error


def opened(path: Path) -> TextIO:
    refuse_device(path)
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    """Raises UserError for one that may have no end."""
    number = 0
    while line := file.readline(_LINE_CHARACTERS_MAX + 1):
        number += 1
        if len(line) > _LINE_CHARACTERS_MAX:
            raise UserError(f"{path}:{number}: the line has more than {_LINE_CHARACTERS_MAX} characters")
        yield line


def _csv(path: Path, file: TextIO) -> Iterator[Arrival]:
    rows, lines = _Rows(), csv.reader(_lines(path, file))
    try:
        header = next(lines, [])
        columns = _columns(header)
        at, model, tokens_in, tokens_out, shift = (columns.get(name, -1) for name in COLUMNS)
        for row in lines:
            if not row:
                continue
            if len(row) != len(header):
                raise ValueError(f"{len(row)} fields; the header has {len(header)}")
            try:
                at_s, input_tokens, output_tokens = float(row[at]), int(row[tokens_in]), int(row[tokens_out])
                priority = int(row[shift]) if shift >= 0 and row[shift] else 0
            except ValueError:
                raise ValueError(_not_numbers(row, columns)) from None
            yield rows.arrival(at_s, row[model] if model >= 0 else "", input_tokens, output_tokens, priority)
    except UnicodeDecodeError:
        raise
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}:{max(1, lines.line_num)}: {error}") from error


def _columns(header: list[str]) -> dict[str, int]:
    """The place of each of `COLUMNS`; model and priority may be missing."""
    columns = {name: header.index(name) for name in COLUMNS if name in header}
    if missing := [name for name in COLUMNS if name not in columns and name not in _OPTIONAL]:
        expected = ", ".join([name for name in COLUMNS if name != "priority"])
        raise ValueError(f"the header lacks {', '.join(missing)}; expected {expected}")
    return columns


def _not_numbers(row: list[str], columns: dict[str, int]) -> str:
    fields = (f"{name} {row[at][:40]!r}" for name, at in columns.items() if name != "model")
    return f"expected seconds and whole numbers of tokens, got {', '.join(fields)}"


def _jsonl(path: Path, file: TextIO, sec_multiplier: float) -> Iterator[Arrival]:
    rows, decode = _Rows(), Decoder(_Timed).decode
    for number, line in enumerate(_lines(path, file), 1):
        if not line.strip():
            continue
        try:
            row = decode(line)
            yield rows.arrival(
                row.timestamp * sec_multiplier, row.model or "", row.input_length, row.output_length, row.priority
            )
        except (ValueError, DecodeError) as error:
            raise UserError(f"{path}:{number}: {error}") from error
