"""One line per event: `time level logger event key=value …`, on stderr.

Prompts, answers and keys never get into a line. Values are short, so a caller cannot pass text by mistake; of an
exception the type and the frames are told but not its message, which may quote a prompt.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from time import gmtime, strftime
from traceback import extract_tb
from typing import TextIO

_VALUE_CHARACTERS = 160
_SECRET = frozenset({"api_key", "authorization", "content", "key", "messages", "password", "prompt", "text", "token"})
Value = str | int | float | bool | None


def setup(level: str, stream: TextIO | None = None) -> None:
    """Sends every logger of this process to `stream`, stderr by default."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


def log(logger: logging.Logger, level: int, event: str, fields: Mapping[str, Value], *, exc_info: bool = False) -> None:
    """Logs `event` with its fields, in their order; with `exc_info` also the exception being handled."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", event, extra={"fields": fields}, exc_info=exc_info)


class LineFormatter(logging.Formatter):
    """`time level logger event key=value …`."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = f"{strftime('%Y-%m-%dT%H:%M:%S', gmtime(record.created))}.{int(record.msecs):03d}Z"
        fields: dict[str, Value] = dict(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[0]:
            frames = extract_tb(record.exc_info[2])
            fields["error"] = record.exc_info[0].__name__
            fields["at"] = ">".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
        words = [stamp, record.levelname.lower(), record.name, _one_line(record.getMessage())]
        return " ".join(words + [f"{name}={_shown(name, value)}" for name, value in fields.items()])


def _shown(name: str, value: Value) -> str:
    if name in _SECRET:
        return "***"
    text = _one_line(str(value))
    if len(text) > _VALUE_CHARACTERS:
        text = text[:_VALUE_CHARACTERS] + "…"
    return f'"{text}"' if not text or " " in text or "=" in text else text


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
