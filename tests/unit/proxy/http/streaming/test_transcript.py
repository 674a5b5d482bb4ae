from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from aegis.core.request import FinishReason, Token
from proxy.http.streaming.transcript import Piece, Transcript, join
from tests.unit.proxy.http.scripted import byte_text

TEXT = byte_text()
SAID = st.text("aé€😀 ", max_size=12)
STOPS = st.lists(st.text("aé€😀 ", min_size=1, max_size=3), max_size=3)
BORDERS = st.lists(st.integers(0, 60), max_size=8)


def told(said: bytes, stops: list[str], borders: list[int], min_tokens: int = 0) -> list[Piece]:
    """The pieces of a transcript to which `said`, one token per byte, is delivered cut at `borders`."""
    transcript = Transcript(TEXT, (), stop=stops, min_tokens=min_tokens)
    ends = sorted({border for border in borders if border < len(said)} | {len(said)})
    pieces = []
    for begin, end in zip([0, *ends], ends, strict=False):
        pieces.append(transcript.push([Token(byte, 0.0) for byte in said[begin:end]]))
        if transcript.finished:
            return pieces
    return [*pieces, transcript.finish(FinishReason.LENGTH)]


@given(SAID, STOPS, BORDERS, st.integers(0, 5))
@example("a€a", ["€a"], [1, 2, 3, 4], 0)
def test_deliveries_change_nothing(said: str, stops: list[str], borders: list[int], min_tokens: int) -> None:
    at_once = told(said.encode(), stops, [], min_tokens)
    in_parts = told(said.encode(), stops, borders, min_tokens)
    one_by_one = told(said.encode(), stops, [*range(60)], min_tokens)
    assert join(at_once) == join(in_parts) == join(one_by_one)


@given(SAID, STOPS, BORDERS)
def test_the_text_is_what_comes_before_the_first_stop_string(said: str, stops: list[str], borders: list[int]) -> None:
    ends = [end for end in range(len(said) + 1) if any(said[:end].endswith(stop) for stop in stops)]
    expected, reason = said, FinishReason.LENGTH
    if ends:
        longest = max(len(stop) for stop in stops if said[: ends[0]].endswith(stop))
        expected, reason = said[: ends[0] - longest], FinishReason.STOP
    pieces = told(said.encode(), stops, borders)
    assert join(pieces).text == expected
    assert [piece.finish for piece in pieces] == [None] * (len(pieces) - 1) + [reason]


@given(SAID, STOPS, BORDERS)
def test_tokens_are_told_with_their_text(said: str, stops: list[str], borders: list[int]) -> None:
    pieces = told(said.encode(), stops, borders)
    whole = join(pieces)
    sent = 0
    for piece in pieces:
        sent += len(piece.text)
        if stops and not piece.finish:
            assert all(token.offset + len(token.text) <= sent for token in piece.tokens)
    assert [token.offset for token in whole.tokens] == sorted(token.offset for token in whole.tokens)
    for token in whole.tokens:
        assert token.text.startswith(whole.text[token.offset : token.offset + len(token.text)])
    if whole.finish is FinishReason.LENGTH:
        assert bytes(token.token.id for token in whole.tokens) == said.encode()


@given(st.binary(max_size=40), BORDERS)
def test_any_bytes_become_the_text_that_decoding_them_all_gives(said: bytes, borders: list[int]) -> None:
    text = join(told(said, [], borders)).text
    assert text == join(told(said, [], [])).text
    text.encode()  # no lone surrogate


@given(SAID)
def test_no_piece_ends_inside_a_character(said: str) -> None:
    pieces = told(said.encode(), [], [*range(60)])
    assert not any("\N{REPLACEMENT CHARACTER}" in piece.text for piece in pieces)


def test_a_character_may_begin_in_the_prompt() -> None:
    transcript = Transcript(TEXT, "€".encode()[:1], stop=())
    pushed = transcript.push([Token(byte) for byte in "€".encode()[1:]])
    assert pushed.text == "€"


def test_what_ends_broken_is_marked_as_such() -> None:
    assert join(told(b"a" + "€".encode()[:2], [], [])).text == "a\N{REPLACEMENT CHARACTER}"
