"""Event streams, however they are cut."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.serve import answer as serve_answer
from bench.serve.answer import Answer, RequestFailed
from tests.openai_stand import DONE, chunk, event, usage


def fed(*pieces: bytes) -> Answer:
    """Piece i comes at time i."""
    answer = Answer()
    for now_ns, piece in enumerate(pieces):
        answer.feed(piece, now_ns)
    return answer


WHOLE = b": waiting\n\n" + chunk("a") + chunk("b\u2028", "stop").replace(b"\n", b"\r\n") + usage(5, 2) + DONE


@given(st.lists(st.integers(0, len(WHOLE)), max_size=8))
def test_where_a_stream_is_cut_makes_no_difference(cuts: list[int]) -> None:
    answer = fed(*(WHOLE[first:stop] for first, stop in pairwise([0, *sorted(cuts), len(WHOLE)])))
    answer.ended()
    assert (answer.done, answer.finish, answer.prompt_tokens, answer.tokens) == (True, "stop", 5, 2)


def test_a_token_has_the_time_at_which_the_end_of_its_event_came() -> None:
    whole = chunk("a")
    assert fed(whole[:-2], whole[-2:] + chunk("b"), chunk("c")).token_times_ns(9) == [1, 1, 2]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=10), st.integers(1, 60) | st.none())
def test_each_token_of_usage_gets_a_time_of_some_chunk(counts: Sequence[int], total: int | None) -> None:
    answer = fed(*(chunk("", token_ids=[1] * count) for count in counts))
    if total is not None:
        answer.feed(usage(1, total), 99)
    times_ns = answer.token_times_ns(99)
    assert len(times_ns) == (total or sum(counts))
    assert times_ns == sorted(times_ns)
    assert times_ns[-1] == len(counts) - 1
    if total in (None, sum(counts)):
        assert [times_ns.count(index) for index in range(len(counts))] == list(counts)


def test_tokens_without_content_came_at_the_end() -> None:
    answer = fed(chunk("", "length"), usage(1, 2))
    answer.ended()
    assert answer.token_times_ns(7) == [7, 7]


@pytest.mark.parametrize(
    ("delta", "tokens"),
    [
        ({"role": "assistant"}, 0),
        ({"role": "assistant", "content": ""}, 0),
        ({"content": "a"}, 1),
        ({"reasoning_content": "a"}, 1),
        ({"reasoning": "a"}, 1),
        ({"tool_calls": [{"index": 0}]}, 1),
    ],
)
def test_content_of_a_chat_is_a_token(delta: object, tokens: int) -> None:
    assert fed(event({"choices": [{"index": 0, "delta": delta}]})).tokens == tokens


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (event({"error": {"message": "it broke", "code": 500}}), "error in the stream: it broke"),
        (event({"error": "it broke"}), "error in the stream: it broke"),
        (event({"error": {}}), "error in the stream: no reason given"),
        (event({"choices": 3}), "an event is not as the API has it"),
        (event({"usage": {"completion_tokens": -5}}), "an event is not as the API has it"),
        (b"data: nonsense\n\n", "an event is not as the API has it"),
    ],
)
def test_what_a_server_says_went_wrong_is_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(RequestFailed, match=f"^{reason}$"):
        fed(data)


def test_an_event_without_end_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_answer, "LINE_BYTES_MAX", 100)
    with pytest.raises(RequestFailed, match="an event of more than"):
        fed(b"data: " + b"x" * 50, b"x" * 50)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([], "before the answer did"),
        ([chunk("a")], "before the answer did"),
        ([chunk("", "stop"), DONE], "has no tokens"),
    ],
)
def test_an_answer_that_is_not_whole_has_failed(pieces: list[bytes], reason: str) -> None:
    with pytest.raises(RequestFailed, match=reason):
        fed(*pieces).ended()


def test_a_finish_is_an_end_without_a_done() -> None:
    fed(chunk("a", "stop")).ended()
