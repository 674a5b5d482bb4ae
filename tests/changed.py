"""The unit tests to run after an edit: changed tests, and tests that import a changed module.

`python -m tests.changed` prints their paths, one a line. Changed files are those that differ from the last
commit; if none does, those of the last commit."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def last_committed() -> set[str]:
    """Paths of Python files of the last commit."""
    command = ["git", "diff", "--name-only", "--no-renames", "HEAD~1", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)  # the first commit has none before it
    return {line for line in done.stdout.splitlines() if line.endswith(".py")}


def changed() -> set[str]:
    """Paths of Python files, those that git does not know yet too."""
    command = ["git", "status", "--porcelain", "--untracked-files=all", "--no-renames"]
    lines = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line[3:] for line in lines if line.endswith(".py")}


def affected_tests(paths: set[str], tests: list[Path]) -> list[Path]:
    """Helpers of tests count as modules: what imports them is run."""
    modules = {module_of(path) for path in paths}
    return [
        test
        for test in tests
        if str(test.relative_to(ROOT)) in paths or any(name in modules for name in imported(test))
    ]


def main() -> None:
    tests = [path for path in sorted((ROOT / "tests" / "unit").rglob("test_*.py")) if path.is_file()]
    sys.stdout.writelines(
        f"{path.relative_to(ROOT)}\n" for path in affected_tests(changed() or last_committed(), tests)
    )


if __name__ == "__main__":
    main()
