"""A JSON object that a client sent. Its class declares its parameters, of kinds from `parameters`; others are unknown.

A parameter that is null counts as absent. Every refusal names the parameter, in `param` and in the message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from hashlib import blake2b
from typing import Any, ClassVar, Generic, Self, TypeVar, overload

import msgspec

from aegis.core.errors import UserError
from proxy.http.errors import nearest, shown

D = TypeVar("D")
F = TypeVar("F", bound="Fields")
T = TypeVar("T")
Schema = dict[str, Any]

_ALIKE = 0.6  # `best_of` is no slip for `stop`


class Fields:
    """`prefix` is the path of a nested object, as in `stream_options.`; `nbytes` is the size of the body as it came."""

    __slots__ = ("_prefix", "_values", "nbytes")
    _names: ClassVar[frozenset[str]] = frozenset()
    _supported: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, values: Mapping[str, Any], prefix: str = "", *, nbytes: int = 0) -> None:
        self.nbytes = nbytes
        self._values = values
        self._prefix = prefix

    def __init_subclass__(cls) -> None:
        declared = {name: each for base in reversed(cls.__mro__) for name, each in vars(base).items()}
        parameters = {name: each for name, each in declared.items() if isinstance(each, Parameter)}
        cls._names = frozenset(parameters)
        cls._supported = frozenset(name for name, each in parameters.items() if not isinstance(each, Unsupported))

    def fingerprint(self, without: Collection[str]) -> str:
        """The same for the same values, in whatever order they came; those of `without` do not count."""
        values = {name: value for name, value in self._values.items() if name not in without}
        return blake2b(msgspec.json.encode(values, order="deterministic"), digest_size=16).hexdigest()

    def take(self, name: str) -> Any:
        """The raw value; None where it is absent."""
        return self._values.get(name)

    def given(self, name: str) -> bool:
        return self._values.get(name) is not None

    def given_of(self, names: frozenset[str]) -> Collection[str]:
        """The names of these that the object has, even as null."""
        return () if names.isdisjoint(self._values) else names & self._values.keys()

    def invalid(self, name: str, problem: str) -> UserError:
        path = self._prefix + name
        return UserError(f"{path!r} {problem}", param=path)

    def nested(self, kind: type[F], name: str, values: Mapping[str, Any]) -> F:
        """The object under the parameter `name`, which is like `name[3]` for an entry of a list."""
        return kind(values, f"{self._prefix}{name}.")

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

    def names_are_supported(self) -> bool:
        """Whether no name is unknown or unsupported."""
        return self._values.keys() <= self._supported

    def unknown(self) -> list[str]:
        """The names that the class does not declare."""
        return [name for name in self._values if name not in self._names]

    def end(self, kind: type[Fields] | None = None) -> None:
        """Raises UserError if the object has a name that its class, or `kind`, does not declare. Call it after all
        parameters were read, so that a wrong value of a known one is reported first."""
        known = (kind or self)._names
        if self._values.keys() <= known:
            return
        name = next(name for name in self._values if name not in known)
        near = nearest(name, known, cutoff=_ALIKE)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        path = self._prefix + name
        raise UserError(f"unknown parameter {shown(path)}{hint}", param=path[:200], code="unknown_parameter")


@dataclass(slots=True, eq=False)
class Parameter(ABC, Generic[T, D]):
    """One parameter, as an attribute of a class of `Fields`. The attribute of an object is the checked value; the
    attribute of the class is this declaration.

    An absent parameter has the value `default`; without a default, `absent` decides. `required` is for the schema: if a
    required parameter has a default, the code that reads it refuses its absence.
    """

    default: D
    _: KW_ONLY
    required: bool = False
    about: str = ""
    name: str = field(init=False, default="")
    has_default: bool = field(init=False, default=True)

    def __set_name__(self, owner: type[Fields], name: str) -> None:
        assert not hasattr(Fields, name), f"{name} is a method of Fields"
        self.name = name

    @overload
    def __get__(self, fields: None, owner: type[Fields]) -> Self: ...

    @overload
    def __get__(self, fields: Fields, owner: type[Fields] | None = None) -> T | D: ...

    def __get__(self, fields: Fields | None, owner: type[Fields] | None = None) -> Self | T | D:
        if fields is None:
            return self
        value = fields._values.get(self.name)
        if value is None:
            return self.default if self.has_default else self.absent(fields)
        return self.check(value, fields, self.name)

    def of(self, fields: Fields) -> T | D:
        """The value in an object of another class, which has turned out to have this parameter too."""
        return self.__get__(fields)

    @abstractmethod
    def check(self, value: Any, fields: Fields, name: str) -> T:
        """The value of the parameter `name` of `fields`, from its JSON `value`. Raises UserError."""

    def absent(self, fields: Fields) -> T:
        """Raises UserError, unless absence means something."""
        raise fields.invalid(self.name, "is required")

    @abstractmethod
    def schema(self) -> Schema: ...


class Unsupported(Parameter[None, None]):
    """A parameter that is refused unless its value is one of `neutral`, which ask for nothing. `refuse_unsupported`
    reads it."""

    __slots__ = ("neutral",)

    def __init__(self, *neutral: object) -> None:
        Parameter.__init__(self, None)
        self.neutral = neutral

    def check(self, value: Any, fields: Fields, name: str) -> None:
        fields.unsupported(name, self.neutral)

    def schema(self) -> Schema:
        return {"enum": [value for i, value in enumerate(self.neutral) if value not in self.neutral[:i]]}
