"""The rules that every source file keeps to."""

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("aegis", "bench", "decode", "memory", "prefill", "proxy")
FILE_LINES_MAX = 600
FILE_LINES_WARNED = 400
FUNCTION_LINES_MAX = 50  # of the body; only ever lowered
BANNED_NAMES = {"eval", "exec"}
BANNED_MODULES = {"dill", "joblib", "marshal", "pickle", "shelve"}
BANNED_ATTRIBUTES = {
    "os.system",
    "torch.cuda.synchronize",
    "torch.load",
    "torch.save",
    "yaml.full_load",
    "yaml.unsafe_load",
}
SERVING = ("aegis/engine", "decode", "memory", "prefill", "proxy")


def product() -> list[Path]:
    return [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]


def texts() -> list[Path]:
    """Every file that a person wrote."""
    files = [file for file in ROOT.iterdir() if file.is_file()]
    for folder in (*PACKAGES, ".ci", "configs", "docs", "tests"):
        files += (ROOT / folder).rglob("*")
    wanted = {".md", ".py", ".toml", ".txt", ".yaml", ""}
    return sorted(file for file in files if file.is_file() and file.suffix in wanted)


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """All of the file's, for every rule looks through them."""
    return tuple(ast.walk(tree(file)))


def place(file: Path, node: ast.AST | None = None) -> str:
    return f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def dotted(node: ast.AST) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join(reversed([*parts, node.id])) if isinstance(node, ast.Name) else ""


def imported(file: Path) -> Iterator[tuple[str, ast.AST]]:
    for node in nodes(file):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node


def test_files_are_short() -> None:
    lines = {place(file): len(file.read_text(encoding="utf-8").splitlines()) for file in product()}
    if long := {name: count for name, count in lines.items() if count > FILE_LINES_WARNED}:
        warnings.warn(f"longer than {FILE_LINES_WARNED} lines: {long}", stacklevel=1)
    assert {name: count for name, count in lines.items() if count > FILE_LINES_MAX} == {}


def test_functions_are_short() -> None:
    long = {}
    for file in product():
        for node in nodes(file):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                count = body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]
                if count > FUNCTION_LINES_MAX:
                    long[f"{place(file, node)} {node.name}"] = count
    assert long == {}


def test_modules_and_rooms_say_what_they_are() -> None:
    assert [place(file) for file in product() if not ast.get_docstring(tree(file))] == []


def test_public_classes_that_do_something_say_what() -> None:
    silent = [
        f"{place(file, node)} {node.name}"
        for file in product()
        for node in nodes(file)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        if _acts(node) and not _told(node)
    ]
    assert silent == []


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]


def _acts(node: ast.ClassDef) -> bool:
    return any(not method.name.startswith("_") and not method.decorator_list for method in _methods(node))


def _told(node: ast.ClassDef) -> bool:
    is_protocol = any(dotted(base) == "Protocol" for base in node.bases)
    return bool(ast.get_docstring(node)) or (is_protocol and all(map(ast.get_docstring, _methods(node))))


def test_nothing_runs_foreign_code_or_stops_a_whole_device() -> None:
    found = [f"{place(file, node)} {what}" for file in product() for node in nodes(file) if (what := _banned(node))]
    assert found == []


def _banned(node: ast.AST) -> str | None:
    match node:
        case ast.Name(id=name) if name in BANNED_NAMES:
            return name
        case ast.Attribute() if dotted(node) in BANNED_ATTRIBUTES:
            return dotted(node)
        case ast.Import(names=names) if {alias.name.split(".")[0] for alias in names} & BANNED_MODULES:
            return names[0].name
        case ast.ImportFrom(module=str(module)) if module.split(".")[0] in BANNED_MODULES:
            return module
        case ast.keyword(arg="trust_remote_code" | "shell" | "allow_pickle" as switch, value=value):
            return None if isinstance(value, ast.Constant) and value.value is False else switch
    return None


@pytest.mark.parametrize(
    "code",
    [
        "eval('1')",
        "torch.load(f)",
        "import pickle",
        "from pickle import loads",
        "f(trust_remote_code=True)",
        "f(shell=x)",
    ],
)
def test_what_is_banned_is_found(code: str) -> None:
    assert any(_banned(node) for node in ast.walk(ast.parse(code)))


def test_the_serving_path_never_sleeps() -> None:
    sleeping = [
        place(file, node)
        for file in product()
        if place(file).startswith(SERVING)
        for node in nodes(file)
        if isinstance(node, ast.Attribute) and dotted(node) == "time.sleep"
    ]
    assert sleeping == []


def test_no_file_knows_a_developers_machine_or_leaves_work_for_later() -> None:
    banned = re.compile(r"/(?:home|root|work|Users)/\w|\b(?:TO" r"DO|FIX" r"ME|X" r"XX|HA" r"CK)\b")
    found = [
        f"{place(file)} {match[0]}"
        for file in texts()
        for match in banned.finditer(file.read_text(encoding="utf-8"))
        if file.name != "LICENSE"
    ]
    assert found == []


def test_what_is_imported_is_declared() -> None:
    """A package that happens to be installed here is missing on a fresh machine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    optional = [line for name, lines in extras.items() if name != "dev" for line in lines]
    declared = {_distribution(line) for line in (*project["dependencies"], *optional)}
    for_tests = declared | {_distribution(line) for line in extras["dev"]}
    providers = importlib.metadata.packages_distributions()
    missing = set()
    for files, allowed in ((product(), declared), ((ROOT / "tests").rglob("*.py"), for_tests)):
        for file in files:
            for name, _ in imported(file):
                top = name.split(".")[0]
                if top in sys.stdlib_module_names or top in (*PACKAGES, "tests"):
                    continue
                if not {_distribution(provider) for provider in (*providers.get(top, ()), top)} & allowed:
                    missing.add(f"{place(file)} {top}")
    assert missing == set()


def _distribution(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


@pytest.mark.parametrize("line", ["make run", "make test"])
def test_the_readme_begins_with_how_to_run_and_test(line: str) -> None:
    head = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:60]
    assert any(text.startswith(line) for text in head)


def test_what_is_generated_is_current() -> None:
    command = [sys.executable, "docs/generate.py", "--check"]
    check = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": "."}, capture_output=True, text=True)
    assert (check.returncode, check.stderr) == (0, "")
