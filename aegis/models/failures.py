"""The errors that libraries raise over a checkpoint that they cannot read, and the one line that a user gets."""

from __future__ import annotations

import errno

from safetensors import SafetensorError

from aegis.core.errors import ModelRefused

_CHARACTERS_MAX = 300

LIBRARY_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    KeyError,
    IndexError,
    NameError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
)


def one_line(error: BaseException) -> str:
    """The first line, without the advice that follows, and what it announces with a colon; of a key that is missing,
    that it is."""
    said = error.args[0] if isinstance(error, KeyError) and error.args else error
    if isinstance(error, KeyError) and isinstance(said, str) and said.isidentifier():
        return f"{said[:_CHARACTERS_MAX]!r} is not given, or not known"
    first, *others = [line.strip() for line in str(said)[: 4 * _CHARACTERS_MAX].splitlines() if line.strip()] or [""]
    told = f"{first} {others[0]}" if first.endswith(":") and others else first
    return told[:_CHARACTERS_MAX] or type(error).__name__


def refused(root: str, reason: str) -> ModelRefused:
    """The checkpoint and why, in one line that a terminal shows as it is, whatever was found in files."""
    return ModelRefused(f"{_printable(root)}: {_printable(reason)[:_CHARACTERS_MAX]}")


def disk_full(error: BaseException) -> bool:
    """Whether the disk takes no more: that is not the checkpoint's doing."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def out_of_memory(error: BaseException | None) -> bool:
    """Whether that is behind it, as Python or torch has it."""
    while error is not None:
        if isinstance(error, MemoryError) or "t allocate memory" in str(error)[: 4 * _CHARACTERS_MAX]:
            return True
        error = error.__cause__
    return False


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
