"""What libraries raise over a checkpoint they cannot make sense of, and the one line of it that a user is told."""

from __future__ import annotations

from safetensors import SafetensorError

_CHARACTERS_MAX = 300

LIBRARY_ERRORS = (
    AttributeError,
    ImportError,
    KeyError,
    IndexError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
)


def one_line(error: BaseException) -> str:
    """The first line, without the advice that follows; of a key that is missing, that it is."""
    said = error.args[0] if isinstance(error, KeyError) and error.args else error
    if isinstance(said, str) and said.isidentifier():
        return f"it lacks {said[:_CHARACTERS_MAX]!r}"
    lines = [line.strip() for line in str(said)[: 4 * _CHARACTERS_MAX].splitlines() if line.strip()]
    return lines[0][:_CHARACTERS_MAX] if lines else type(error).__name__
