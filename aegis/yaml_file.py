"""Reading a YAML file that a user wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from aegis.core.errors import UserError


def read_mapping(file: Path) -> dict[str, Any]:
    """The mapping a file holds. A key without a value counts as not given.

    Raises UserError, one line with the file's name, where it cannot be read, is no YAML, or gives a key twice.
    """
    try:
        content = yaml.load(file.read_bytes(), _UniqueKeys)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise UserError(f"{file}: nested too deeply") from None
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f" line {mark.line + 1}:" if mark else ""
        raise UserError(f"{file}:{line} not readable as YAML: {problem or 'not text'}") from None
    if not isinstance(content, dict | None):
        raise UserError(f"{file}: should hold keys and values, as configs/demo.yaml does")
    return _without_nulls(content or {})


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
