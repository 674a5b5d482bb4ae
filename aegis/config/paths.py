"""Paths as users write them, and what is amiss with one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aegis.core.errors import UserError

_CHARACTERS_MAX = 300


@contextmanager
def refusing(where: str, path: str) -> Iterator[None]:
    """For what is done with a path that `where` gives. Raises UserError, one line with both, where the path cannot be
    looked at: of a user that there is not, links in a circle, a name that no file can have, a directory that may not
    be read."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        shown = (path if path.isprintable() else repr(path))[:_CHARACTERS_MAX]
        raise UserError(f"{where}: {shown}: {reason[:_CHARACTERS_MAX]}") from None


def refuse_device(file: Path) -> None:
    """Raises UserError for a device, also where a link leads to it: it may have no end, like /dev/zero."""
    if file.is_char_device() or file.is_block_device():
        raise UserError(f"{file}: is no regular file or pipe")
