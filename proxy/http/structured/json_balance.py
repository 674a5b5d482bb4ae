"""Where a JSON object that arrives in pieces ends."""

from __future__ import annotations


class Balance:
    """Counts braces outside of strings. `depth` is how many are open already."""

    __slots__ = ("_depth", "_escaped", "_quoted")

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._escaped = False
        self._quoted = False

    def feed(self, text: str) -> int | None:
        """Goes on with `text`: how much of it belongs to the object, None where all of it does and there is more."""
        for index, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = character == "\\"
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None
