"""One line per event, on stderr: `time level logger event key=value …`, or a JSON object with the same.

Prompts, answers and keys never get into a line. Values are short, so a caller cannot pass text by mistake; of an
exception the type and the frames are told but not its message, which may quote a prompt. What clients ask is logged by
`log_text` alone, where the server was told to.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from time import gmtime, strftime
from traceback import extract_tb
from typing import TextIO, cast

import msgspec

from aegis.telemetry.log_writer import LogWriter

_VALUE_CHARACTERS = 160
_TEXT_CHARACTERS = 10_000
_FINISH_S = 0.5
_SECRET = frozenset({"api_key", "authorization", "content", "key", "messages", "password", "prompt", "text", "token"})
_APART = frozenset(' ="')
Value = str | int | float | bool | None


class LogSettings(msgspec.Struct, frozen=True):
    """The log settings of a process. `texts`: log clients' prompts, too."""

    level: str = "info"
    format: str = "text"
    texts: bool = False


def setup(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Sends every logger of this process to `stream`, stderr by default."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_formatter(settings))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.level.upper())


def guard_streams(settings: LogSettings) -> None:
    """From now on a reader that does not read what this process writes does not stop it: `setup` comes after this."""
    sys.stdout, sys.stderr = _guarded(sys.stdout, settings), _guarded(sys.stderr, settings)
    atexit.register(finish)


def _guarded(stream: TextIO, settings: LogSettings) -> TextIO:
    def dropped_line(lines: int) -> str:
        record = logging.LogRecord(__name__, logging.WARNING, "", 0, "the log was not read", None, None)
        record.fields = {"lines_dropped": lines}
        return _formatter(settings).format(record) + "\n"

    with contextlib.suppress(OSError):
        return cast(TextIO, LogWriter(stream, dropped_line))
    return stream


def lines_dropped() -> int:
    """The number of lines that no reader took, since the start of this process."""
    return sum(stream.dropped for stream in (sys.stdout, sys.stderr) if isinstance(stream, LogWriter))


def finish() -> None:
    """Before the process ends without further ado: gives a reader a moment for what it has not read."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, LogWriter):
            stream.finish(_FINISH_S)
        else:
            stream.flush()


def log(logger: logging.Logger, level: int, event: str, fields: Mapping[str, Value], *, exc_info: bool = False) -> None:
    """Logs `event` with its fields, in their order; with `exc_info` also the exception being handled."""
    if logger.isEnabledFor(level):
        logger.log(level, "%s", event, extra={"fields": fields}, exc_info=exc_info)


def log_text(logger: logging.Logger, event: str, fields: Mapping[str, Value], text: str) -> None:
    """Logs what a client wrote, of which this is the one way into a line."""
    logger.info("%s", event, extra={"fields": fields, "written": text})


def _formatter(settings: LogSettings) -> logging.Formatter:
    return JsonFormatter() if settings.format == "json" else LineFormatter()


class LineFormatter(logging.Formatter):
    """`time level logger event key=value …`."""

    def format(self, record: logging.LogRecord) -> str:
        words = [_stamp(record), record.levelname.lower(), record.name, _one_line(record.getMessage())]
        return " ".join(words + [f"{name}={_quoted(str(value))}" for name, value in _fields(record).items()])


class JsonFormatter(logging.Formatter):
    """`{"time", "level", "logger", "event", …}`: the fields as they are, numbers as numbers."""

    def format(self, record: logging.LogRecord) -> str:
        head = {"time": _stamp(record), "level": record.levelname.lower(), "logger": record.name}
        head["event"] = _one_line(record.getMessage())
        return msgspec.json.encode(_fields(record) | head).decode()


def _stamp(record: logging.LogRecord) -> str:
    return f"{strftime('%Y-%m-%dT%H:%M:%S', gmtime(record.created))}.{int(record.msecs):03d}Z"


def _fields(record: logging.LogRecord) -> dict[str, Value]:
    fields = {name: _shown(name, value) for name, value in getattr(record, "fields", {}).items()}
    if record.exc_info and record.exc_info[0]:
        frames = extract_tb(record.exc_info[2])
        fields["error"] = record.exc_info[0].__name__
        fields["at"] = ">".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    if (written := getattr(record, "written", None)) is not None:
        fields["text"] = _one_line(written[:_TEXT_CHARACTERS])
    return fields


def _shown(name: str, value: Value) -> Value:
    if name in _SECRET:
        return "***"
    if value is None or isinstance(value, int | float):
        return value
    text = _one_line(value)
    return text if len(text) <= _VALUE_CHARACTERS else text[:_VALUE_CHARACTERS] + "…"


def _quoted(text: str) -> str:
    """Nothing in it looks like the end of the value, or like another field: paths are what clients ask for."""
    if text and _APART.isdisjoint(text):
        return text
    escaped = text.replace("\\", r"\\").replace('"', r"\"")
    return f'"{escaped}"'


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
