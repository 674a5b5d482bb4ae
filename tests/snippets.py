"""The programs of `docs/clients.md`, with the address and the models of a server that a test has."""

from __future__ import annotations

from tests.schedule import ROOT

PAGE = ROOT / "docs" / "clients.md"


def snippet(heading: str, url: str, *, model: str, embedder: str = "") -> str:
    """The first program under the heading."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    section = section.partition("\n## ")[0]
    _, _, program = section.partition("\n```")
    program = program.partition("\n")[2].partition("\n```")[0]
    assert program, f"there is no program under {heading!r}"
    return program.replace("http://127.0.0.1:8000", url).replace("YOUR-MODEL", model).replace("YOUR-EMBEDDER", embedder)
