"""Declares the parameters of JSON objects. Each is declared once: reading and the JSON Schema both follow from it.

    class TrimBody(Fields):
        instance = required(Text(None))
        timeout_s = Number(30.0, low=0.0, high=3600.0, open_low=True)

`body.timeout_s` is the checked value, 30.0 where the client left it out, and raises UserError where it is wrong.
`schema_of(TrimBody)` is its schema in `/openapi.json`.

A value is checked when it is read, and not by pydantic: the words of a refusal, and the choice among several wrong
parameters, are part of the API.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Never

from aegis.config.sizes import parse_size
from proxy.http.errors import shown
from proxy.http.fields import D, F, Fields, Parameter, Schema, T, Unsupported

INT64_MAX = (1 << 63) - 1
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_NULL: Schema = {"type": "null"}
_SIZE_CHARACTERS = 64


@dataclass(slots=True, eq=False)
class WithoutDefault(Parameter[T, Never]):
    """A parameter whose `check` gets None if it is absent."""

    default: Never = field(init=False)
    required: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        self.has_default = False

    def absent(self, fields: Fields) -> T:
        return self.check(None, fields, self.name)


def required(parameter: Parameter[T, Any]) -> Parameter[T, Never]:
    """Makes the parameter one that requests have to have."""
    parameter.required, parameter.has_default = True, False
    return parameter


@dataclass(slots=True, eq=False)
class Flag(Parameter[bool, D]):
    """True or false. `only` is the one value in the schema if the code that reads it refuses the other."""

    only: bool | None = None

    def check(self, value: Any, fields: Fields, name: str) -> bool:
        if not isinstance(value, bool):
            raise fields.invalid(name, f"must be true or false, not {shown(value)}")
        return value

    def schema(self) -> Schema:
        return {"type": "boolean"} if self.only is None else {"enum": [self.only]}


@dataclass(slots=True, eq=False)
class Integer(Parameter[int, D]):
    """A whole number in [low, high]."""

    low: int = -INT64_MAX - 1
    high: int = INT64_MAX

    def check(self, value: Any, fields: Fields, name: str) -> int:
        return self._within(value, fields, name, self.high)

    def read_at_most(self, fields: Fields, high: int) -> int | D:
        """The value, if other parameters set a lower maximum."""
        value = fields.take(self.name)
        return self.default if value is None else self._within(value, fields, self.name, high)

    def _within(self, value: Any, fields: Fields, name: str, high: int) -> int:
        if type(value) is not int:
            raise fields.invalid(name, f"must be an integer, not {shown(value)}")
        if not self.low <= value <= high:
            raise fields.invalid(name, f"must be between {self.low} and {high}, not {shown(value)}")
        return value

    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(slots=True, eq=False)
class Number(Parameter[float, D]):
    """A number in [low, high], or in (low, high] with `open_low`."""

    low: float
    high: float
    open_low: bool = False

    def check(self, value: Any, fields: Fields, name: str) -> float:
        if type(value) not in (int, float):
            raise fields.invalid(name, f"must be a number, not {shown(value)}")
        if not self.low <= value <= self.high or (self.open_low and value == self.low):
            least = f"above {self.low:g} and at most" if self.open_low else f"between {self.low:g} and"
            raise fields.invalid(name, f"must be {least} {self.high:g}, not {shown(value)}")
        return float(value)

    def schema(self) -> Schema:
        return {"type": "number", "exclusiveMinimum" if self.open_low else "minimum": self.low, "maximum": self.high}


@dataclass(slots=True, eq=False)
class Text(Parameter[str, D]):
    """A string, not empty. `narrower` has keywords of the schema that are not checked here."""

    most_characters: int = 256
    narrower: Mapping[str, Any] = field(default_factory=dict)

    def check(self, value: Any, fields: Fields, name: str) -> str:
        if not isinstance(value, str):
            raise fields.invalid(name, f"must be a string, not {shown(value)}")
        if not 0 < len(value) <= self.most_characters:
            raise fields.invalid(name, f"must have 1 to {self.most_characters} characters, not {len(value)}")
        return value

    def schema(self) -> Schema:
        return {"type": "string", "minLength": 1, "maxLength": self.most_characters, **self.narrower}


@dataclass(slots=True, eq=False)
class AnyText(Parameter[str, None]):
    """A string of any length, empty too."""

    default: None = field(init=False, default=None)

    def check(self, value: Any, fields: Fields, name: str) -> str:
        if not isinstance(value, str):
            raise fields.invalid(name, f"must be a string, not {shown(value)}")
        return value

    def schema(self) -> Schema:
        return {"type": "string"}


@dataclass(slots=True, eq=False)
class OneOf(Parameter[str, None]):
    """A string out of `values`. `problem` is the error for any other one."""

    default: None = field(init=False, default=None)
    values: tuple[str, ...]
    problem: str = ""

    def check(self, value: Any, fields: Fields, name: str) -> str:
        if value in self.values:
            known: str = value
            return known
        text = _SHORT.check(value, fields, name)
        raise fields.invalid(name, self.problem or f"must be one of {', '.join(self.values)}, not {shown(text)}")

    def schema(self) -> Schema:
        return {"enum": list(self.values)}


_SHORT = Text(None)


@dataclass(slots=True, eq=False)
class Size(Parameter[int, None]):
    """Bytes, as a whole number or written like 256MiB."""

    default: None = field(init=False, default=None)

    def check(self, value: Any, fields: Fields, name: str) -> int:
        if type(value) is int or (isinstance(value, str) and len(value) <= _SIZE_CHARACTERS):
            with suppress(ValueError):
                if 0 < (nbytes := parse_size(value)) <= INT64_MAX:
                    return nbytes
        raise fields.invalid(name, f"must be a size like 256MiB, not {shown(value)}")

    def schema(self) -> Schema:
        text = {"type": "string", "minLength": 1, "maxLength": _SIZE_CHARACTERS}
        return {"anyOf": [{"type": "integer", "minimum": 1, "maximum": INT64_MAX}, text]}


@dataclass(slots=True, eq=False)
class Items(Parameter[list[Any], tuple[()]]):
    """A list of up to `most` entries. The code that reads it checks them against `each`, and that there are `least`."""

    default: tuple[()] = field(init=False, default=())
    each: Mapping[str, Any] | type[Fields]
    most: int
    least: int = 0

    def check(self, value: Any, fields: Fields, name: str) -> list[Any]:
        if not isinstance(value, list):
            raise fields.invalid(name, f"must be a list, not {shown(value)}")
        if len(value) > self.most:
            raise fields.invalid(name, f"may have at most {self.most} entries, not {len(value)}")
        return value

    def schema(self) -> Schema:
        each = schema_of(self.each) if isinstance(self.each, type) else self.each
        return {"type": "array", "items": each, "minItems": self.least, "maxItems": self.most}


@dataclass(slots=True, eq=False)
class Object(Parameter[dict[str, Any], None]):
    """An object whose names are no parameters, or are nobody's concern here."""

    default: None = field(init=False, default=None)
    like: Mapping[str, Any] = field(default_factory=lambda: ANY_OBJECT)

    def check(self, value: Any, fields: Fields, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise fields.invalid(name, f"must be an object, not {shown(value)}")
        return value

    def schema(self) -> Schema:
        return dict(self.like)


@dataclass(slots=True, eq=False)
class Nested(Parameter[F, None]):
    """An object with parameters of its own: of `kind`, or of one of `kinds`, which have more."""

    default: None = field(init=False, default=None)
    kind: type[F]
    kinds: tuple[type[F], ...] = ()

    def check(self, value: Any, fields: Fields, name: str) -> F:
        if not isinstance(value, dict):
            raise fields.invalid(name, f"must be an object, not {shown(value)}")
        return fields.nested(self.kind, name, value)

    def schema(self) -> Schema:
        return {"oneOf": list(map(schema_of, self.kinds))} if self.kinds else schema_of(self.kind)


@dataclass(slots=True, eq=False)
class RequiredNested(WithoutDefault[F]):
    """An object with parameters of its own that has to be given. Where it is absent it is read as an empty one, and the
    refusal names what that lacks."""

    kind: type[F]

    def check(self, value: Any, fields: Fields, name: str) -> F:
        if value is not None and not isinstance(value, dict):
            raise fields.invalid(name, f"must be an object, not {shown(value)}")
        return fields.nested(self.kind, name, value or {})

    def schema(self) -> Schema:
        return schema_of(self.kind)


@dataclass(slots=True, eq=False)
class Anything(Parameter[Any, None]):
    """A value of several forms, with the schema `like`; the code that reads it tells them apart and refuses others."""

    default: None = field(init=False, default=None)
    like: Mapping[str, Any]

    def check(self, value: Any, fields: Fields, name: str) -> Any:
        return value

    def schema(self) -> Schema:
        return dict(self.like)


def refuse_unsupported(fields: Fields, kind: type[Fields]) -> None:
    """Raises UserError if an unsupported parameter is asked for that `kind` itself declares, and not a base of it."""
    names, parameters = _unsupported(kind)  # type: ignore[arg-type]  # mypy: a class is not Hashable where objects are
    if given := fields.given_of(names):
        for parameter in parameters:
            if parameter.name in given:
                fields.unsupported(parameter.name, parameter.neutral)


@cache
def _unsupported(kind: type[Fields]) -> tuple[frozenset[str], tuple[Unsupported, ...]]:
    parameters = tuple(each for each in vars(kind).values() if isinstance(each, Unsupported))
    return frozenset(each.name for each in parameters), parameters


def parameters_of(kind: type[Fields]) -> dict[str, Parameter[Any, Any]]:
    """The parameters of a body by their names, without those that are refused whatever their value."""
    declared = {name: each for base in reversed(kind.__mro__) for name, each in vars(base).items()}
    return {
        name: each
        for name, each in declared.items()
        if isinstance(each, Parameter) and not (isinstance(each, Unsupported) and not each.neutral)
    }


def schema_of(kind: type[Fields]) -> Schema:
    """An object of these parameters alone, each of which may be null unless it is required."""
    parameters = parameters_of(kind)
    return {
        "type": "object",
        "properties": {name: _schema(parameter) for name, parameter in parameters.items()},
        "required": [name for name, parameter in parameters.items() if parameter.required],
        "additionalProperties": False,
    }


def _schema(parameter: Parameter[Any, Any]) -> Schema:
    schema = parameter.schema() | ({"description": parameter.about} if parameter.about else {})
    return schema if parameter.required else {"anyOf": [schema, _NULL]}
