"""Which code a results file is of: what counts as a change of it, and that every published file says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.common import provenance
from bench.common.provenance import DEPENDENCIES, RESULTS, ROOT, Provenance, digest, here, stamped
from bench.common.result_files import write_json

BEFORE = '''"""A module."""

import os


@cache
def twice(x):  # for tests
    """Of `x`."""
    return 2 * x


NAME = "#é"
"""A name."""
'''
SAME = [
    BEFORE.replace("A module", "The module").replace("Of `x`", "Two of\n    `x`"),
    BEFORE.replace("  # for tests", "").replace("A name", "The name"),
    BEFORE.replace("import os", "import os.path\nfrom aegis import (\n    core,\n)"),
    BEFORE.replace("    return", "\n    # twice\n    return"),
]
OTHER = [
    BEFORE.replace("2 *", "3 *"),
    BEFORE.replace("@cache", "@lru_cache"),
    BEFORE.replace("#é", "#e"),
    BEFORE.replace("    return", "    if x:\n        return"),
    BEFORE + "x = 1\n",
]


def of(root: Path, **files: str) -> str:
    """The digest of the code of `schedule` where it is these files."""
    (root / "memory").mkdir(parents=True)
    for name, text in files.items():
        (root / "memory" / f"{name}.py").write_text(text, encoding="utf-8")
    return digest("schedule", root)


@pytest.mark.parametrize("text", SAME)
def test_words_and_imports_are_no_change(tmp_path: Path, text: str) -> None:
    assert of(tmp_path / "a", x=text) == of(tmp_path / "b", x=BEFORE)


@pytest.mark.parametrize("text", OTHER)
def test_another_statement_is_a_change(tmp_path: Path, text: str) -> None:
    assert of(tmp_path / "a", x=text) != of(tmp_path / "b", x=BEFORE)


def test_a_statement_that_moves_to_another_file_is_no_change(tmp_path: Path) -> None:
    assert of(tmp_path / "a", x=BEFORE + "\ny = 1\n") == of(tmp_path / "b", x="y = 1\n", z=BEFORE)


def test_all_code_that_figures_depend_on_is_there() -> None:
    assert [path for paths in DEPENDENCIES.values() for path in paths if not (ROOT / path).exists()] == []


def test_every_published_file_says_which_code_it_is_of() -> None:
    heads = {
        file.stem: provenance.read(json.loads(file.read_text(encoding="utf-8"))) for file in RESULTS.glob("*.json")
    }
    assert heads.keys() <= DEPENDENCIES.keys()
    assert [name for name, head in heads.items() if head is None or head.commit is None] == []


def test_what_is_measured_now_is_of_this_code() -> None:
    head = here("schedule")
    assert not provenance.has_changed("schedule", head)
    assert provenance.has_changed("schedule", Provenance(head.commit, head.date, head.machine, "another"))


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(provenance, "RESULTS", tmp_path)
    return tmp_path


def test_a_file_that_is_published_gets_its_head(results: Path) -> None:
    write_json(results / "schedule.json", {"figures": []})
    written = json.loads((results / "schedule.json").read_text(encoding="utf-8"))
    assert list(written) == ["measured", "figures"]
    assert written["measured"]["code"] == digest("schedule")


@pytest.mark.parametrize("name", ["elsewhere/schedule.json", "mine.json"])
def test_any_other_file_is_as_it_was(results: Path, name: str) -> None:
    content = {"figures": []}
    assert stamped(results / name, content) is content


def test_a_head_that_is_there_stays(results: Path) -> None:
    content: dict[str, Any] = {"measured": {"commit": "1234567"}, "figures": []}
    assert stamped(results / "schedule.json", content) == content


def test_code_that_is_no_checkout_has_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert here("schedule").commit is None
