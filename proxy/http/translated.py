"""Errors of a request that another one was made of: what they name, in the words of the first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from aegis.core.errors import UserError


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Raises UserErrors of the block with these parameters by their other names."""
    try:
        yield
    except UserError as error:
        raise _renamed(error, names) from None


def _renamed(error: UserError, names: Mapping[str, str]) -> UserError:
    def other(path: str) -> str:
        name = re.split(r"[.\[]", path, maxsplit=1)[0]
        longest = max(
            (known for known in names if path == known or path.startswith(known + ".")), key=len, default=name
        )
        return names.get(longest, longest) + path[len(longest) :]

    message = re.sub(r"'([a-z_]+(?:[.\[][\w.\[\]]*)?)'", lambda found: f"'{other(found[1])}'", error.message)
    return UserError(
        message,
        status=error.status,
        param=None if error.param is None else other(error.param),
        code=error.code,
        kind=error.kind,
        retry_after_s=error.retry_after_s,
        reason=error.reason,
    )
