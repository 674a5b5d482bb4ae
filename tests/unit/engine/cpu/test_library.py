"""Compiled steps on processors that lack their instructions: the library can be loaded there, and says so."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from aegis.engine import cpu
from aegis.engine.cpu import library

_RUNTIME_BYTES = 16
"""Of pointers to what the C runtime itself runs: its beginning, and libgcc's look at the processor."""
_WIDE = re.compile(r"%[yz]mm\d|%xmm(1[6-9]|[23]\d)|%k[1-7]")


@pytest.fixture
def built() -> Path:
    file = Path(cpu.__file__).with_name(f"_steps{EXTENSION_SUFFIXES[0]}")
    if not file.exists() or not shutil.which("objdump"):
        pytest.skip("no compiler built the steps here")
    return file


def _told(*command: object) -> str:
    return subprocess.run([str(each) for each in command], check=True, capture_output=True, text=True).stdout


def test_it_runs_nothing_when_it_is_loaded(built: Path) -> None:
    """What runs then meets processors without AVX-512."""
    section = next(line.split() for line in _told("objdump", "-h", built).splitlines() if " .init_array " in line)
    assert int(section[2], 16) <= _RUNTIME_BYTES


def test_whether_it_is_supported_is_asked_with_instructions_that_every_processor_has(built: Path) -> None:
    code = _told("objdump", "-d", "--disassemble=aegis_supported", built)
    assert "<aegis_supported>:" in code and "ret" in code
    assert not _WIDE.search(code)


def test_what_was_built_for_another_python_is_not_taken(
    built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It stays in a checkout whose Python was replaced, and nothing builds it anew."""
    (tmp_path / "_steps.cpython-30-x86_64-linux-gnu.so").write_bytes(b"of older sources")
    (tmp_path / built.name).symlink_to(built)
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    library._opened.cache_clear()
    told = library.missing()
    library._opened.cache_clear()
    assert told is None or "processor" in told


def test_why_steps_are_not_compiled_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def told() -> str:
        library._opened.cache_clear()
        return library.missing() or ""

    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    assert "not compiled where aegis was installed" in told()
    (tmp_path / "_steps.so").write_bytes(b"no library")
    assert told() == "they were compiled for another machine"
    monkeypatch.setenv("AEGIS_NO_COMPILED_STEPS", "1")
    assert told() == "AEGIS_NO_COMPILED_STEPS turns them off"
    monkeypatch.undo()
    assert (told() == "") == (library.library() is not None)
