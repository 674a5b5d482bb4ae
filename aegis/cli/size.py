"""The argument SIZE of commands that limit memory."""

from __future__ import annotations

from aegis.config.sizes import parse_size
from aegis.core.errors import UserError

_BYTES_MAX = 1 << 62


def parse_limit(text: str) -> int:
    """Raises UserError, also for what no memory can have, which the servers' ends tell in words of their own."""
    try:
        nbytes = parse_size(text)
    except ValueError as error:
        raise UserError(f"SIZE: {error}") from None
    if not 0 < nbytes <= _BYTES_MAX:
        raise UserError(f"SIZE: {text!r} is no size that memory can have")
    return nbytes
