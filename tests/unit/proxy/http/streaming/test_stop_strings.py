from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from proxy.http.streaming.stop_strings import StopScanner

LETTERS = st.text("ab", max_size=40)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def cut(text: str, borders: list[int]) -> list[str]:
    ends = sorted({border % (len(text) + 1) for border in borders} | {len(text)})
    return [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def first_end(text: str, stops: list[str]) -> tuple[int, int] | None:
    """By trying every prefix: where the first stop string is complete, and its length."""
    for end in range(len(text) + 1):
        complete = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete)
    return None


@given(LETTERS, STOPS, st.lists(st.integers(0, 40)))
@example("aab", ["aab", "b", "ab"], [1])
@example("aabaaab", ["aaab"], [])
def test_the_first_complete_stop_string_is_found_however_the_text_is_cut(
    text: str, stops: list[str], borders: list[int]
) -> None:
    scanner, fed, found = StopScanner(stops), 0, None
    for part in cut(text, borders):
        match = scanner.feed(part)
        if match:
            found = (fed + match.end, match.length)
            break
        fed += len(part)
    assert found == first_end(text, stops)


@given(LETTERS, STOPS)
def test_what_is_held_is_the_longest_end_of_the_text_that_begins_a_stop_string(text: str, stops: list[str]) -> None:
    scanner = StopScanner(stops)
    if scanner.feed(text) is None:
        begins = [n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])]
        assert scanner.held == max(begins)
