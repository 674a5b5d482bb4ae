"""Takes named parameters out of a JSON object, each checked; what nobody took is unknown.

A parameter that is null counts as absent. Every refusal names the parameter, in `param` and in the message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any, TypeVar, cast

import msgspec

from aegis.config.sizes import parse_size
from aegis.core.errors import UserError
from proxy.http.errors import nearest, shown

D = TypeVar("D")

INT64_MAX = (1 << 63) - 1
_SIZE_CHARACTERS = 64
_ALIKE = 0.6  # `best_of` is no slip for `stop`


class Fields:
    """`prefix` is the path of a nested object, as in `stream_options.`; `nbytes` is what all of it came as."""

    __slots__ = ("_known", "_prefix", "_values", "nbytes")

    def __init__(self, values: Mapping[str, Any], prefix: str = "", *, nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self._values = values
        self._prefix = prefix
        self._known: set[str] = set()

    def fingerprint(self, without: Collection[str]) -> str:
        """The same for the same values, in whatever order they came; those of `without` do not count."""
        values = {name: value for name, value in self._values.items() if name not in without}
        return blake2b(msgspec.json.encode(values, order="deterministic"), digest_size=16).hexdigest()

    def take(self, name: str) -> Any:
        """The raw value; None if it is absent."""
        self._known.add(name)
        return self._values.get(name)

    def given(self, name: str) -> bool:
        return self.take(name) is not None

    def refusal(self, name: str, problem: str) -> UserError:
        path = self._prefix + name
        return UserError(f"{path!r} {problem}", param=path)

    def integer(self, name: str, default: D, *, low: int = -INT64_MAX - 1, high: int = INT64_MAX) -> int | D:
        """A whole number in [low, high]."""
        value = self.take(name)
        if value is None:
            return default
        if type(value) is not int:
            raise self.refusal(name, f"must be an integer, not {shown(value)}")
        if not low <= value <= high:
            raise self.refusal(name, f"must be between {low} and {high}, not {shown(value)}")
        return value

    def number(self, name: str, default: float, *, low: float, high: float, open_low: bool = False) -> float:
        """A number in [low, high], or in (low, high] with `open_low`."""
        value = self.take(name)
        if value is None:
            return default
        if type(value) not in (int, float):
            raise self.refusal(name, f"must be a number, not {shown(value)}")
        if not low <= value <= high or (open_low and value == low):
            least = f"above {low:g} and at most" if open_low else f"between {low:g} and"
            raise self.refusal(name, f"must be {least} {high:g}, not {shown(value)}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(name, f"must be true or false, not {shown(value)}")
        return value

    def text(self, name: str, default: D, *, most_characters: int = 256) -> str | D:
        """A string, not empty."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refusal(name, f"must be a string, not {shown(value)}")
        if not 0 < len(value) <= most_characters:
            raise self.refusal(name, f"must have 1 to {most_characters} characters, not {len(value)}")
        return value

    def required_text(self, name: str) -> str:
        value = self.text(name, None)
        if value is None:
            raise self.refusal(name, "is required")
        return value

    def required_size(self, name: str) -> int:
        """Bytes, as a whole number or written like 256MiB."""
        value = self.take(name)
        if value is None:
            raise self.refusal(name, "is required")
        with suppress(ValueError):
            if type(value) is int or (isinstance(value, str) and len(value) <= _SIZE_CHARACTERS):
                return parse_size(value)
        raise self.refusal(name, f"must be a size like 256MiB, not {shown(value)}")

    def items(self, name: str, *, most: int) -> list[Any]:
        """A list of at most `most` entries, their types unchecked; empty if absent."""
        value = self.take(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.refusal(name, f"must be a list, not {shown(value)}")
        if len(value) > most:
            raise self.refusal(name, f"may have at most {most} entries, not {len(value)}")
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise self.refusal(name, f"must be an object, not {shown(value)}")
        return cast("dict[str, Any] | None", value)

    def nested(self, name: str) -> Fields:
        """The parameters of a nested object; none where it is absent."""
        return Fields(self.mapping(name) or {}, f"{self._prefix}{name}.")

    def entry(self, name: str, index: int, values: Mapping[str, Any]) -> Fields:
        """The parameters of an object in a list."""
        return Fields(values, f"{self._prefix}{name}[{index}].")

    def unsupported(self, name: str, neutral: tuple[object, ...] = ()) -> None:
        """Refuses `name` unless its value is one of `neutral`, which ask for nothing."""
        value = self.take(name)
        if value is None or any(type(value) is type(same) and value == same for same in neutral):
            return
        only = f"; leave it out or send {' or '.join(map(shown, neutral))}" if neutral else "; leave it out"
        raise UserError(
            f"{self._prefix + name!r} is not supported here{only}",
            param=self._prefix + name,
            code="unsupported_parameter",
        )

    def elsewhere(self, name: str, instead: str) -> None:
        """Refuses `name`, which another route takes: nothing that is like it here is meant."""
        if name in self._values:
            path = self._prefix + name
            raise UserError(f"unknown parameter {path!r}; {instead}", param=path, code="unknown_parameter")

    def end(self) -> None:
        """Raises UserError if a parameter was given that nobody took."""
        for name in self._values:
            if name not in self._known:
                near = nearest(name, self._known, cutoff=_ALIKE)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                path = self._prefix + name
                raise UserError(f"unknown parameter {shown(path)}{hint}", param=path[:200], code="unknown_parameter")
