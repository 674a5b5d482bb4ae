"""What JSON from a client may consist of, counted before it is decoded, and that an object has each name once.

The decoder lets the interpreter go nowhere, so what takes it long keeps the event loop from running, from a thread too.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import Any

import msgspec

from aegis.core.errors import UserError
from proxy.http.errors import shown

PARTS_MAX = 1 << 16
"""Strings, lists and objects, names counted as strings."""

VALUES_MAX = 1 << 20
"""Of any kind, numbers too."""

FRACTIONS_MAX = 1 << 14
"""Numbers that are written with a point; one that lies between two floats takes the decoder 2 microseconds."""

EXPONENTS_MAX = 256
"""Numbers that are written with an exponent, of which five bytes may take it 40 microseconds, and many digits 150."""

_SMALL_BYTES = 2048  # which cannot take long
_EXPONENT = re.compile(rb"[0-9.][eE]")
_HALF_PAIR_AT_END = re.compile(rb'(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}"[^\\]{0,5}\Z')
_MALFORMED = "JSON is malformed: "
_NAME_OR_BRACE = re.compile(rb'"((?:[^"\\]++|\\.)*+)"(\s*+:)?|[{}]', re.DOTALL)


def check_counts(content: bytes, parts_max: int = PARTS_MAX) -> int:
    """How many parts there are at most: `content` need not be JSON. Raises UserError if there are too many."""
    parts = content.count(b'"') // 2 + content.count(b"[") + content.count(b"{")
    if parts <= parts_max and len(content) <= _SMALL_BYTES:
        return parts
    if b"\\" in content:
        content = content.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is left of quotes begins or ends a string
    parts = (content.count(b'"') + 1) // 2
    if parts <= parts_max:
        outside = b" ".join(content.split(b'"')[::2])  # brackets in a string are no list
        parts += outside.count(b"[") + outside.count(b"{")
        if parts <= parts_max and (problem := _problem(outside)):
            raise UserError(f"the body has more than {problem}", code="too_many_parts")
    if parts > parts_max:
        raise UserError(f"the body has more than {PARTS_MAX} strings, lists and objects", code="too_many_parts")
    return parts


def check_names(content: bytes) -> None:
    """Raises UserError if an object of `content`, which is JSON, has a name twice: of two values another reader may
    take the other one. Unlike a decoder it lets others run in between."""
    objects = list[set[bytes]]()
    for found in _NAME_OR_BRACE.finditer(content):
        kind = found[0]
        if kind == b"{":
            objects.append(set())
        elif kind == b"}":
            objects.pop()
        elif found[2] is not None:
            name = found[1]
            if b"\\" in name:
                name = msgspec.json.decode(b'"%s"' % name, type=str).encode()
            names = objects[-1]
            if name in names:
                told = name.decode()
                raise UserError(f"{shown(told)} is given more than once in one object", param=told[:200])
            names.add(name)


def json_problem(content: bytes, error: ValueError | RecursionError) -> str:
    """Why `content` is no JSON, which the decoder refused with `error`. The decoder calls it truncated too where a
    string ends, shortly before the end of all, with the first half of a surrogate pair."""
    told = str(error).removeprefix(_MALFORMED)
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError) or "UTF-8" in told:  # by the version of the decoder
        return "it is not UTF-8"
    if "surrogate" in told or _HALF_PAIR_AT_END.search(content[-64:]):
        return "a string has half of a surrogate pair (\\ud800 to \\udfff) without the other half"
    return "it ends too early" if "truncated" in told else told


class InnerJson:
    """JSON in strings of one request, bounded together as if it were a body of its own."""

    __slots__ = ("_parts_left",)

    def __init__(self) -> None:
        self._parts_left = PARTS_MAX

    def decoded(self, text: str) -> Any:
        """Raises UserError beyond the bounds; ValueError or RecursionError where it is no JSON."""
        content = text.encode()
        self._parts_left -= check_counts(content, self._parts_left)
        value = msgspec.json.decode(content)
        check_names(content)
        return value

    def arguments(self, text: str) -> dict[str, Any] | None:
        """Those of a call that a model has made; None where they are no object, as of one that was cut off. Raises
        UserError beyond the bounds."""
        try:
            value = self.decoded(text or "{}")
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


def _problem(content: bytes) -> str | None:
    """What there is too much of, if what looks like a number is one."""
    if content.count(b",") + content.count(b":") > VALUES_MAX:
        return f"{VALUES_MAX} values"
    if content.count(b".") > FRACTIONS_MAX:
        return f"{FRACTIONS_MAX} numbers with a point"
    letters = content.count(b"e") + content.count(b"E")
    if letters > EXPONENTS_MAX and next(islice(_EXPONENT.finditer(content), EXPONENTS_MAX, None), None):
        return f"{EXPONENTS_MAX} numbers with an exponent"
    return None
