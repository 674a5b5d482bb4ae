"""The schedule of `make test` names tests that exist, keeps together what shares a server, and lets nothing run beside
what judges how soon a server answers but what only computes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.schedule import COMPUTING, OTHER_SERVERS, ROOT, SHARING, SLOWEST, group_of

MEASURES = ("under_attack", "asked_beside", "ends_soon")
"""Of the attacks: what judges how soon the server answers others meanwhile, or ends."""


def used_fixtures(file: Path) -> set[str]:
    """Of others, by the tests and the fixtures of a file."""
    text = file.read_text(encoding="utf-8")
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    own = {function.name for function in functions if function.decorator_list}
    callers = [function for function in functions if function.decorator_list or function.name.startswith("test_")]
    names = {argument.arg for function in callers for argument in function.args.args}
    return (names - own) | {name for name in SHARING if f'getfixturevalue("{name}")' in text}


def measuring(file: Path) -> list[str]:
    """The file's tests that judge how soon a server answers and are not marked so."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if "pytestmark = pytest.mark.alone" in map(ast.unparse, tree.body):
        return []
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [
        test.name
        for test in tests
        if any(isinstance(node, ast.Name) and node.id in MEASURES for node in ast.walk(test))
        and "pytest.mark.alone" not in map(ast.unparse, test.decorator_list)
    ]


def test_every_path_exists() -> None:
    paths = [*SLOWEST, OTHER_SERVERS, *COMPUTING, *(path for members in SHARING.values() for path in members)]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("directory", ["faults", "live"])
def test_tests_that_share_a_server_are_in_its_group(directory: str) -> None:
    files = {file.relative_to(ROOT).as_posix(): file for file in (ROOT / "tests" / directory).rglob("test_*.py")}
    shared = {path: used_fixtures(file) & SHARING.keys() for path, file in files.items()}
    assert any(shared.values())
    assert {path: names for path, names in shared.items() if names - {group_of(path)}} == {}


def test_what_computes_beside_others_starts_no_server() -> None:
    files = [file for path in COMPUTING for file in [ROOT / path, *(ROOT / path).rglob("*.py")] if file.suffix == ".py"]
    assert len(files) > len(COMPUTING)
    starting = [file.name for file in files if "tests.live" in file.read_text(encoding="utf-8")]
    assert not starting and not [file.name for file in files if used_fixtures(file) & SHARING.keys()]


def test_attacks_that_judge_how_soon_a_server_answers_are_alone() -> None:
    files = sorted((ROOT / "tests/attacks").glob("test_*.py"))
    assert {file.name: tests for file in files if (tests := measuring(file))} == {}
