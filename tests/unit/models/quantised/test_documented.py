"""docs/checkpoints.md names every format that is read, and the tests have a checkpoint of each."""

from __future__ import annotations

import re
from pathlib import Path

from aegis.models.quantised.configuration import READERS
from tests.unit.models.quantised.test_refused import FORMS as DAMAGED
from tests.unit.models.quantised.test_registered import FORMS

PAGE = (Path(__file__).parents[4] / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def test_the_methods_are_those_that_are_read() -> None:
    table = PAGE.partition("| `quant_method` |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([a-z0-9-]+)`", table, re.MULTILINE)) == set(READERS)
    written = {form.settings["quant_method"] for form in FORMS.values()}
    assert written | {settings["quant_method"] for settings, _ in DAMAGED.values()} == set(READERS)
