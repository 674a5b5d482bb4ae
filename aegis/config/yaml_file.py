"""Reading a YAML file that a user wrote."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from aegis.core.errors import UserError

BYTES_MAX = 4 << 20
_NODES_MAX = 100_000
_HALF = re.compile("[\ud800-\udfff]")


Lines = dict[tuple[Any, ...], int]
"""Of each key of a file, counted from 1."""


def read_mapping(file: Path) -> dict[str, Any]:
    """The mapping a file holds. A key without a value counts as not given. Raises UserError."""
    return read_with_lines(file)[0]


def read_with_lines(file: Path) -> tuple[dict[str, Any], Lines]:
    """The same, and its lines, of one reading: a pipe has no second one, and a file may be written again meanwhile.

    Raises UserError, one line with the file's name, where it cannot be read, is too large or no YAML, or gives a key
    twice.
    """
    try:
        if file.stat().st_size > BYTES_MAX:
            raise UserError(f"{file}: it has {file.stat().st_size >> 20} MiB, at most {BYTES_MAX >> 20} are read")
        with file.open("rb") as opened:
            text = opened.read(BYTES_MAX + 1)
        if len(text) > BYTES_MAX:  # of a device or a pipe, which has no size
            raise UserError(f"{file}: it has more than {BYTES_MAX >> 20} MiB, which is all that is read")
        content, lines = _content(text)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise UserError(f"{file}: nested too deeply") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f" line {mark.line + 1}:" if mark else ""
        raise UserError(f"{file}:{line} not readable as YAML: {problem or 'not text'}") from None
    except (ValueError, AttributeError):  # PyYAML's, of a date like 2026-13-45, or of !!int "x"
        raise UserError(f"{file}: a value is not what it looks like, or its tag says; put it in quotes") from None
    if not isinstance(content, dict | None):
        raise UserError(f"{file}: should hold keys and values, as configs/demo.yaml does")
    return _without_nulls(content or {}), lines


def _content(text: bytes) -> tuple[Any, Lines]:
    """Aliases are read as what they stand for, as long as that is bounded."""
    loader = _UniqueKeys(text)
    try:
        node = loader.get_single_node()
        lines: Lines = {}
        if node is None:
            return None, lines
        _check(node)
        _note_lines(node, (), lines)  # before keys are merged, which leaves them in two places
        return loader.construct_document(node), lines
    finally:
        loader.dispose()


def _check(whole: yaml.Node) -> None:
    """Raises YAMLError if aliases lead into themselves, or multiply, or a text is none that can be sent on."""
    left, seen = [whole], 0
    while left:
        node, seen = left.pop(), seen + 1
        if seen > _NODES_MAX:
            raise yaml.MarkedYAMLError(problem="aliases make more of it than can be read", problem_mark=node.start_mark)
        if isinstance(node, yaml.MappingNode):
            left += [value for _, value in node.value]
        elif isinstance(node, yaml.ScalarNode) and _HALF.search(node.value):
            problem = "half of a surrogate pair is no character"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        elif isinstance(node, yaml.SequenceNode):
            left += node.value


def _note_lines(node: yaml.Node, path: tuple[Any, ...], lines: Lines) -> None:
    inner: list[tuple[Any, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        inner = [(key.value, key, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)]
    elif isinstance(node, yaml.SequenceNode):
        inner = [(at, value, value) for at, value in enumerate(node.value)]
    for name, place, value in inner:
        lines[(*path, name)] = place.start_mark.line + 1
        _note_lines(value, (*path, name), lines)


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_nulls(inner) if isinstance(inner, dict) else inner
        for key, inner in value.items()
        if inner is not None
    }


class _UniqueKeys(yaml.SafeLoader):
    """YAML forbids a key twice in one mapping; PyYAML would keep the last without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key should be a word", problem_mark=key.start_mark)
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} is given twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)
