"""A request of chat that another one was translated into, and its errors in the words of the first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from aegis.core.errors import UserError

_QUOTED = re.compile(r"'([a-z_]+(?:[.\[][^'\s]*)?)'")
_TOOL = re.compile(r"tools\[(\d+)\](?:\.function)?")


class Translated(Struct, frozen=True):
    """The parameters of the chat request, and the place that each of its tools had among those of the first."""

    values: dict[str, Any]
    tools: tuple[int, ...] = ()

    @contextmanager
    def renamed(self, names: Mapping[str, str]) -> Iterator[None]:
        """Raises UserErrors of the block with these parameters of chat by their other names."""
        try:
            yield
        except UserError as error:
            raise self._renamed(error, names) from None

    def _renamed(self, error: UserError, names: Mapping[str, str]) -> UserError:
        return UserError(
            _QUOTED.sub(lambda found: f"'{self._other(found[1], names)}'", error.message),
            status=error.status,
            param=None if error.param is None else self._other(error.param, names),
            code=error.code,
            kind=error.kind,
            retry_after_s=error.retry_after_s,
            reason=error.reason,
        )

    def _other(self, path: str, names: Mapping[str, str]) -> str:
        found = _TOOL.match(path)
        if found and int(found[1]) < len(self.tools):  # what a client sent may look like a path
            rest = path[found.end() :]
            begins = next((name for name in names if name.startswith(".") and rest.startswith(name)), "")
            return f"tools[{self.tools[int(found[1])]}]{names.get(begins, '')}{rest[len(begins) :]}"
        fitting = (name for name in names if path == name or path.startswith((f"{name}.", f"{name}[")))
        longest = max(fitting, key=len, default="")
        return names.get(longest, "") + path[len(longest) :]
