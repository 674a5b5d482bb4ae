"""Reasons of missed bars."""

from pathlib import Path

from bench.tables.missed_bars import MISSED, reason_of, reason_of_claim

DOCS = Path(__file__).parents[4] / "docs"


def test_a_reason_goes_when_its_bar_is_reached() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))
    assert [name for name, reason in MISSED.items() if reason not in pages] == []


def test_the_closest_name_with_a_reason_counts() -> None:
    assert reason_of("overload: TTFT/muxserve", "overload: TTFT") == MISSED["overload: TTFT/muxserve"]
    assert reason_of("overload: TTFT/qlm", "overload: TTFT") == MISSED["overload: TTFT"]
    assert reason_of("another figure") == reason_of_claim("another claim") == "not explained"
