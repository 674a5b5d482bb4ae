"""Where the configuration comes from: command-line options over `AEGIS_…` variables over a YAML file over defaults.

The four are merged as one tree that remembers where each value came from, and validated once; so an error names the
option, the variable, or the file and key that has to be changed, in one line.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from aegis.config import OPTIONS, Config, Key, leaves, variable
from aegis.core.clock import NS_PER_MS
from aegis.core.errors import UserError
from aegis.slo import limits_ns
from aegis.yaml_file import read_mapping


def load(options: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Config:
    """The configuration from `options` (names as in `OPTIONS`, and `config`; None: not given), `environ` and the file.

    Raises UserError: one line that names the option, the variable, or the file and key at fault.
    """
    tree = _Tree()
    if file := options.get("config") or environ.get("AEGIS_CONFIG"):
        tree.put_file(Path(file))
    for path in [OPTIONS["slo"], *(path for path, _ in leaves())]:
        if text := environ.get(variable(path)):
            tree.put_all(path, text.split(",") if path == OPTIONS["models"] else text, variable(path))
    for name, path in OPTIONS.items():
        if (value := options.get(name)) is not None:
            tree.put_all(path, value, "--" + name.replace("_", "-"))
    return tree.validated()


class _Tree:
    """Nested values, and for each value that was put where it came from."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._origins: dict[tuple[Any, ...], str | Path] = {}

    def put_file(self, file: Path) -> None:
        self._values = read_mapping(file)
        self._origins[()] = file
        _place(self._values, file.parent)

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
        node[path[-1]] = value
        self._origins[path] = origin
        if path == OPTIONS["models"]:  # they take the place of all models the file names
            self._values.pop("models", None)

    def validated(self) -> Config:
        try:
            return Config.model_validate(self._values)
        except ValidationError as error:
            first, *others = error.errors(include_url=False)
            more = f" (and {len(others)} more)" if others else ""
            raise UserError(f"{self._where(first['loc'])}: {_reason(first)}{more}") from None

    def _where(self, loc: tuple[Any, ...]) -> str:
        """What a user has to change: the nearest origin above the value, else those of the values below it."""
        key = ".".join(str(part) for part in loc if part != "[key]")
        for depth in range(len(loc), -1, -1):
            if origin := self._origins.get(loc[:depth]):
                return f"{origin}: {key}" if isinstance(origin, Path) else origin
        return ", ".join(str(origin) for path, origin in self._origins.items() if path[: len(loc)] == loc) or key


def _reason(error: Mapping[str, Any]) -> str:
    """What is wrong, without the library's own words."""
    match error["type"]:
        case "extra_forbidden":
            keys = [path[-1] for path, _ in leaves()] + list(Config.model_fields)
            near = difflib.get_close_matches(str(error["loc"][-1]), keys, n=1)
            return "unknown key" + (f"; did you mean {near[0]}?" if near else "")
        case "model_type" | "dict_type":
            return "should be a mapping"
        case "missing":
            return "is missing"
        case "string_pattern_mismatch":
            if error["loc"][-1] == "prefix":
                return "should be of letters, digits and . _ -, with / between parts"
            return "is no model name; use letters, digits and . : / @ + - _"
        case "value_error":
            return str(error["ctx"]["error"])
    text = str(error["msg"]).removeprefix("Input ").split(", unable to parse")[0]
    return f"{text}, not {error['input']!r}"


def _place(content: dict[str, Any], directory: Path) -> None:
    """Paths in a file start where the file is."""
    models, sources = content.get("models"), content.get("sources")
    for entry in models.values() if isinstance(models, dict) else ():
        if isinstance(entry, dict) and isinstance(path := entry.get("path"), str):
            entry["path"] = str(directory / Path(path).expanduser())
    if isinstance(sources, list):
        content["sources"] = [
            str(directory / Path(x).expanduser()) if isinstance(x, str) and x.startswith(("./", "../", "~")) else x
            for x in sources
        ]
