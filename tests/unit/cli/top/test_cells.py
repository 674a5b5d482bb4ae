"""The contents of the cells."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from aegis.cli.top.cells import COLOURS, bar, named, share


@given(st.floats(0, 1), st.integers(1, 40))
def test_a_bar_is_as_wide_as_it_is_said_to_be(part: float, width: int) -> None:
    assert len(bar(part, width).plain) == width


def test_a_share_is_whole_only_where_nothing_is_missing() -> None:
    assert share(1.0).plain == "100.0%"
    assert share(0.99999).plain == "99.9%"
    assert share(None).plain == "–"


def test_models_look_different() -> None:
    seen = {(cell.plain, str(cell.spans)) for cell in (named("m", seat) for seat in range(48))}
    assert len(seen) == 48


def test_the_colours_are_the_dashboard_s() -> None:
    text = (Path(__file__).parents[4] / "proxy/http/dashboard/colours.js").read_text()
    dark = re.search(r"DARK = \[(.*?)\]", text)
    assert dark and tuple(re.findall(r"#\w{6}", dark[1])) == COLOURS
