"""The sources of the configuration: command-line options over `AEGIS_…` variables over a YAML file over defaults.

The four are merged as one tree that remembers where each value came from, and validated once; so an error names the
option, the variable, or the file and key that has to be changed, in one line.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from aegis.config.config import LISTS, OPTIONS, Config, Key, leaves, variable
from aegis.config.paths import refusing
from aegis.config.slo import limits_ns
from aegis.config.values import OptionText
from aegis.config.yaml_file import Lines, read_with_lines
from aegis.core.clock import NS_PER_MS
from aegis.core.errors import UserError

SECRETS = frozenset({"admin_key", "api_key", "key", "url"})
"""Keys whose values are never quoted."""


_FILES = (("server", "api_key_file", "admin_key_file", "ssl_certfile", "ssl_keyfile"), ("mqtt", "ca_file"))
"""Sections with keys that are paths."""

_OPTION_OF = {path: name for name, path in OPTIONS.items()}
_KEYS = frozenset(path for path, _ in leaves())


def load(options: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Config:
    """The configuration from `options` (names as in `OPTIONS`, and `config`; None: not given), `environ` and the file.

    Raises UserError: one line that names the option, the variable, or the file and key at fault.
    """
    tree = _Tree()
    if file := config_file(options, environ):
        tree.put_file(file)
    for path in [OPTIONS["slo"], *(path for path, _ in leaves())]:
        if text := environ.get(variable(path)):
            tree.put_all(path, _listed(text) if path in LISTS else text, variable(path))
    for name, path in OPTIONS.items():
        if (value := options.get(name)) is not None:
            tree.put_all(path, value, "--" + name.replace("_", "-"))
    return tree.validated()


def config_file(options: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Path | None:
    """The one that `load` reads."""
    file = options.get("config") or environ.get("AEGIS_CONFIG")
    return Path(file).absolute() if file else None


def look_at(file: Path) -> tuple[Config, Lines] | list[str]:
    """What a file alone says, or all that is wrong with it, a line for each: its line, its key, what was expected."""
    tree = _Tree()
    try:
        tree.put_file(file.absolute())
    except UserError as error:
        return [error.message]
    return tree.mistakes() or (tree.validated(), tree.lines)


class _Tree:
    """Nested values, and for each value that was put where it came from."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._origins: dict[tuple[Any, ...], str | Path] = {}
        self.lines: Lines = {}  # of the file

    def put_file(self, file: Path) -> None:
        self._values, self.lines = read_with_lines(file)
        self._origins[()] = file
        _place(self._values, file.parent, self._where)

    def put_all(self, path: Key, value: Any, origin: str) -> None:
        """Deadlines are told in one text, and what it does not name stays as it is. Raises UserError."""
        if path != OPTIONS["slo"]:
            self.put(path, value, origin)
            return
        for name, limit_ns in limits_ns(value, origin).items():
            self.put((*path, f"{name}_ms"), limit_ns / NS_PER_MS, origin)

    def put(self, path: Key, value: object, origin: str) -> None:
        node = self._values
        for depth, key in enumerate(path[:-1], start=1):
            node = node.setdefault(key, {})
            if not isinstance(node, dict):
                raise UserError(f"{self._where(path[:depth])}: should be a mapping")
        node[path[-1]] = OptionText(value) if isinstance(value, str) else value
        self._origins[path] = origin
        if path == OPTIONS["models"]:  # they take the place of all models the file names
            self._values.pop("models", None)

    def validated(self) -> Config:
        try:
            return Config.model_validate(self._values)
        except ValidationError as error:
            first, *others = (self._described(each) for each in error.errors(include_url=False))
            more = f" (and {len(others)} more)" if others else ""
            raise UserError(first + more) from None

    def mistakes(self) -> list[str]:
        """What is wrong with the file, in the order of its lines."""
        try:
            Config.model_validate(self._values)
        except ValidationError as error:
            found = sorted(error.errors(include_url=False), key=lambda each: self._line(each["loc"]) or 0)
            return [self._described(each) for each in found]
        return []

    def _where(self, loc: tuple[Any, ...], reason: str = "") -> str:
        """The setting that a user has to change: the nearest origin above the value, and the origins of the values
        below it that the reason speaks of. The file is none where it says nothing of what the reason speaks of."""
        above = (self._origins[loc[:depth]] for depth in range(len(loc), -1, -1) if loc[:depth] in self._origins)
        nearest = next(above, None)
        if isinstance(nearest, str):
            return nearest
        below = {path: str(origin) for path, origin in self._origins.items() if path and path[: len(loc)] == loc}
        meant = [below[path] for path in _spoken_of(below, reason)]
        if nearest is None:
            return ", ".join(meant or below.values()) or _dotted(loc)
        others = _spoken_of([path for path in self.lines if path in _KEYS and path[: len(loc)] == loc], reason)
        at_fault = [path for path in others if path not in below]
        if meant and not at_fault:
            return ", ".join(meant)
        place = loc or next(iter(at_fault), ())
        line = self._line(place)
        in_file = (str(nearest), f"line {line}" if line else "", _dotted(place))
        return ", ".join([": ".join(filter(None, in_file)), *meant])

    def _described(self, error: Mapping[str, Any]) -> str:
        reason = _reason(error)
        return f"{self._where(error['loc'], reason)}: {reason}"

    def _line(self, loc: tuple[Any, ...]) -> int | None:
        """The line of the key at fault, else of the nearest one around it."""
        lines = (self.lines[loc[:depth]] for depth in range(len(loc), 0, -1) if loc[:depth] in self.lines)
        return next(lines, None)


def _dotted(loc: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in loc if part != "[key]")


def _spoken_of(paths: Iterable[tuple[Any, ...]], reason: str) -> list[tuple[Any, ...]]:
    """The paths whose keys, or options, are among the words of the reason."""
    words = re.findall(r"\w+", reason)
    return [path for path in paths if path[-1] in words or _OPTION_OF.get(path) in words]


def _reason(error: Mapping[str, Any]) -> str:
    """The mistake, without the library's own words."""
    match error["type"]:
        case "extra_forbidden":
            near = difflib.get_close_matches(str(error["loc"][-1]), _keys_around(error["loc"]), n=1)
            return "unknown key" + (f"; did you mean {near[0]}?" if near else "")
        case "model_type" | "dict_type":
            return "should be a mapping"
        case "missing":
            return "is missing"
        case "string_too_short" | "too_short":
            return "is empty"
        case "tuple_type":
            return f"should be a list, not {error['input']!r}"
        case "string_pattern_mismatch":
            return _pattern(error["loc"])
        case "value_error":
            return str(error["ctx"]["error"])
    text = str(error["msg"]).removeprefix("Input ").split(", unable to ")[0]
    return text if error["loc"][-1] in SECRETS else f"{text}, not {error['input']!r}"


def _pattern(loc: tuple[Any, ...]) -> str:
    """What a text should be like that is not like that."""
    match loc[0], loc[-1]:
        case "mqtt", _:
            return "should be of letters, digits and . _ -, with / between parts"
        case "redis", _:
            return "should be of letters, digits and . _ -, 64 at most"
        case _, "otlp":
            return "should be the address of a collector of traces, like http://127.0.0.1:4318"
        case "api_keys", _:
            return "is no name of a key; use letters, digits and . _ @ -"
    return "is no model name; use letters, digits and . : / @ + - _"


def _listed(text: str) -> list[str]:
    """The values of a variable that has several."""
    return [each.strip() for each in text.split(",")]


def _keys_around(loc: tuple[Any, ...]) -> list[str]:
    """The keys of the section in which the key stands."""
    kind: Any = Config
    for part in loc[:-1]:
        is_map = get_origin(kind) is dict
        kind = get_args(kind)[1] if is_map else kind.model_fields[part].annotation
    return list(kind.model_fields)


def _place(content: dict[str, Any], directory: Path, where: Callable[[Key], str]) -> None:
    """Paths in a file start where the file is. Raises UserError, which says `where` one is that leads nowhere."""

    def place(entry: object, *loc: str) -> None:
        if isinstance(entry, dict) and isinstance(path := entry.get(loc[-1]), str):
            entry[loc[-1]] = _placed(path, directory, where(loc))

    for section, name in (("models", "path"), ("api_keys", "file")):
        entries = content.get(section)
        for key, entry in entries.items() if isinstance(entries, dict) else ():
            place(entry, section, key, name)
    for section, *names in _FILES:
        for name in names:
            place(content.get(section), section, name)
    if isinstance(sources := content.get("sources"), list):
        content["sources"] = [
            _placed(x, directory, where(("sources",))) if isinstance(x, str) and x.startswith(("./", "../", "~")) else x
            for x in sources
        ]


def _placed(path: str, directory: Path, where: str) -> str:
    with refusing(where, path):
        return str(directory / Path(path).expanduser())
