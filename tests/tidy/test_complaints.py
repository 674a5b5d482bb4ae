"""Every complaint has an answer that a test backs, or that says what is not done."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
REFUSED = ("How much one adds has no benchmark yet.",)
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows() -> list[str]:
    lines = (ROOT / "docs/complaints.md").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.startswith("| ") and not line.startswith("| complaint")]


def test_each_has_a_test_or_says_what_is_not_done() -> None:
    assert len(rows()) >= 20
    assert [row for row in rows() if not _TEST.search(row) and not any(reason in row for reason in REFUSED)] == []


def test_the_tests_are_there() -> None:
    missing = []
    for file, name in {found for row in rows() for found in _TEST.findall(row)}:
        path = ROOT / file
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        if not any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body):
            missing.append(f"{file}::{name}")
    assert missing == []
