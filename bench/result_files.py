"""Files of results: written whole, or not at all."""

from __future__ import annotations

from pathlib import Path

from aegis.core.errors import UserError


def write(file: Path, content: bytes) -> None:
    """Raises UserError."""
    try:
        file.write_bytes(content)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from None
