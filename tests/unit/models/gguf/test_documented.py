"""docs/checkpoints.md names every type and architecture that is read, and the tests have a file of each."""

from __future__ import annotations

import re
from pathlib import Path

from aegis.models.gguf import header
from aegis.models.gguf.architectures import ARCHITECTURES
from aegis.models.gguf.blocks import BLOCKS
from tests import gguf_files
from tests.unit.models.gguf.test_registered import FILES

PAGE = (Path(__file__).parents[4] / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def row(title: str) -> list[str]:
    found = re.search(rf"^\| {re.escape(title)} \| (.*) \|$", PAGE, re.MULTILINE)
    assert found, title
    return found[1].split(", ")


def test_the_types_are_those_that_are_read() -> None:
    assert row("types of tensors") == [kind.name for kind in sorted(BLOCKS)]
    assert {kind for _, kind, _ in FILES.values()} == {kind.name for kind in BLOCKS}


def test_the_architectures_are_those_that_are_read() -> None:
    assert row("architectures, as files name them") == list(ARCHITECTURES)
    written = {gguf_files.ARCHITECTURES.get(model_type, model_type) for model_type, _, _ in FILES.values()}
    assert written == set(ARCHITECTURES)


def test_the_bounds_are_those_that_hold() -> None:
    assert row("the header") == [f"{header.HEADER_BYTES_MAX >> 20} MiB"]
    assert row("entries") == [str(header.ENTRIES_MAX)]
    assert row("tensors")[0].split()[0] == str(header.TENSORS_MAX)
    assert row("texts in arrays (tokens, merges)") == [f"{header.STRINGS_MAX:,}".replace(",", " ")]
