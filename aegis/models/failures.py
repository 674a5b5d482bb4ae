"""What libraries raise over a checkpoint they cannot make sense of, and the one line of it that a user is told."""

from __future__ import annotations

from safetensors import SafetensorError

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
    """The first line, without the advice that follows."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
