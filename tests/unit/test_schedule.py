"""The schedule of `make test` names tests that exist, and keeps together what shares a server."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.schedule import OTHER_SERVERS, ROOT, SHARING, SLOWEST, group_of


def used_fixtures(file: Path) -> set[str]:
    """Of others, by the tests and the fixtures of a file."""
    text = file.read_text(encoding="utf-8")
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    own = {function.name for function in functions if function.decorator_list}
    callers = [function for function in functions if function.decorator_list or function.name.startswith("test_")]
    names = {argument.arg for function in callers for argument in function.args.args}
    return (names - own) | {name for name in SHARING if f'getfixturevalue("{name}")' in text}


def test_every_path_exists() -> None:
    paths = [*SLOWEST, OTHER_SERVERS, *(path for members in SHARING.values() for path in members)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("directory", ["faults", "live"])
def test_tests_that_share_a_server_are_in_its_group(directory: str) -> None:
    files = {file.relative_to(ROOT).as_posix(): file for file in (ROOT / "tests" / directory).rglob("test_*.py")}
    shared = {path: used_fixtures(file) & SHARING.keys() for path, file in files.items()}
    assert any(shared.values())
    assert {path: names for path, names in shared.items() if names - {group_of(path)}} == {}
