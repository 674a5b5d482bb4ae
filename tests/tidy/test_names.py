"""Names are words of the field, and the glossary's words are names."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("aegis", "bench", "decode", "memory", "prefill", "proxy")
BANNED = {
    "bury",
    "coax",
    "deaf",
    "departures",
    "desk",
    "errand",
    "estate",
    "hall",
    "hands",
    "homes",
    "housed",
    "meeting",
    "roads",
    "seam",
    "ticket",
    "tickets",
    "tidings",
    "torn",
    "twins",
    "wish",
    "wishes",
}
"""Words that say something to their author only."""

PUBLIC = {"wish_bytes"}
"""Names in what clients get as JSON."""

GLOSSARY_PAGE = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
GLOSSARY = re.findall(r"^\| ([^|]+?) +\| ", GLOSSARY_PAGE, re.MULTILINE)[1:]  # without the head of the table


def sources() -> list[Path]:
    return [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]


def words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Classes, functions and attributes that are defined there, each with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    yield item.target.id, item.lineno


def banned(text: str, module: str) -> list[str]:
    defined = [(module, 1), *names(ast.parse(text))]
    return [f"{line} {name}" for name, line in defined if name not in PUBLIC and BANNED & set(words(name))]


@cache
def vocabulary() -> str:
    """All identifiers of the product and the names of its files, in words, set apart by bars."""
    identifiers = {part for file in sources() for part in file.relative_to(ROOT).with_suffix("").parts}
    for file in sources():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                    identifiers.add(name)
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    identifiers.add(name)
    return " | ".join(" ".join(words(identifier)) for identifier in sorted(identifiers))


def test_no_name_is_a_word_of_the_house() -> None:
    found = {str(file.relative_to(ROOT)): banned(file.read_text(encoding="utf-8"), file.stem) for file in sources()}
    assert {file: of_file for file, of_file in found.items() if of_file} == {}


@pytest.mark.parametrize(
    "text", ["class Wish: ...", "def by_homes(): ...", "class A:\n    ticket: int", "def f(self):\n    self._desk = 1"]
)
def test_a_banned_word_is_found(text: str) -> None:
    assert banned(text, "module")


@pytest.mark.parametrize("entry", [word for entry in GLOSSARY for word in entry.split(", ")])
def test_a_word_of_the_glossary_is_used_in_the_code(entry: str) -> None:
    """As an identifier, or a part of one; each word of several."""
    stems = [word.removesuffix("ing").removesuffix("ment") for word in words(entry)]
    assert [stem for stem in stems if not re.search(rf"\b{stem}", vocabulary())] == []


def test_the_glossary_is_read() -> None:
    assert {"activation", "page", "weight image", "TBT, TTFT"} <= set(GLOSSARY)
