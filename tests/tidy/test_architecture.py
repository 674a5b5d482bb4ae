"""docs/architecture.md: the names on it exist, the ways are short, and the map is complete and in order."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
HOPS = {"The way of a request": 14, "The way of a weight": 8, "The way of a page": 6}
LEVEL_MAX = 24
"""Files of one room at one level."""


def named() -> list[tuple[str, str]]:
    return re.findall(r"`([a-z_/]+\.(?:py|js))(?:: ([\w.]+))?`", PAGE)


def rooms() -> list[str]:
    (table,) = re.findall(r"## The rooms\n.*?\n(\|.*?)\n\n", PAGE, re.DOTALL)
    return [room for line in table.splitlines()[2:] for room in re.findall(r"`([a-z_./]+)`", line.split("|")[1])]


@pytest.mark.parametrize(("file", "name"), named())
def test_every_name_is_there(file: str, name: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    scope: ast.AST = ast.parse(text) if name else ast.Module([], [])
    for part in filter(None, name.split(".")):
        defined = {node.name: node for node in scope.body if hasattr(node, "name")}  # type: ignore[attr-defined]
        assert part in defined
        scope = defined[part]


@pytest.mark.parametrize("title", HOPS)
def test_ways_are_short(title: str) -> None:
    (section,) = re.findall(rf"## {title}\n(.*?)(?=\n## )", PAGE, re.DOTALL)
    hops = re.findall(r"^\d+\. `[a-z_/]+\.py: [\w.]+`", section, re.MULTILINE)
    assert 0 < len(hops) <= HOPS[title]
    assert len(hops) == len(re.findall(r"^\d+\. ", section, re.MULTILINE)), "each hop begins with a file and a name"


def test_every_room_is_on_the_map() -> None:
    packages = {"memory", "prefill", "decode", "bench"}
    packages |= {f"{top}/{path.name}" for top in ("aegis", "proxy") for path in (ROOT / top).iterdir() if path.is_dir()}
    files = {f"aegis/{path.name}" for path in (ROOT / "aegis").glob("*.py")} - {"aegis/__init__.py"}
    known = set(rooms())
    assert {room for room in packages | files if not room.endswith("__pycache__")} - known == set()
    assert [room for room in known if not (ROOT / room).exists()] == []


def test_rooms_are_in_the_order_of_their_imports() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    (contract,) = [contract for contract in contracts["contracts"] if contract["id"] == "layers"]
    layers = [re.split(r" [|:] ", layer) for layer in reversed(contract["layers"])]
    level = {room: number for number, layer in enumerate(layers) for room in layer}
    levels = [level[room.removesuffix(".py").replace("/", ".")] for room in rooms()]
    assert levels == sorted(levels)


def test_no_room_is_a_hall() -> None:
    counts = dict[str, int]()
    for package in ("aegis", "bench", "decode", "memory", "prefill", "proxy"):
        for path in (ROOT / package).rglob("*.py"):
            room = str(path.parent.relative_to(ROOT))
            counts[room] = counts.get(room, 0) + (path.name != "__init__.py")
    assert {room: count for room, count in counts.items() if count > LEVEL_MAX} == {}
