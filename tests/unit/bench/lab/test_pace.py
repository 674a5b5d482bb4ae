"""Which gaps of a stream count, and which of its tokens were on time."""

from __future__ import annotations

import pytest

from aegis.core.clock import NS_PER_MS
from aegis.core.errors import UserError
from aegis.core.model import Slo
from bench.lab.pace import Stream, gaps_of

SLO = Slo(ttft_ns=1000 * NS_PER_MS, tbt_ns=100 * NS_PER_MS)


def _stream(came_ms: list[int], tokens: list[int], sent_ms: int = 0) -> Stream:
    return Stream("m", "made", sent_ms * NS_PER_MS, tuple(ms * NS_PER_MS for ms in came_ms), tuple(tokens))


def test_gaps_are_between_the_events_of_one_stream() -> None:
    streams = [_stream([500, 600, 900], [1, 2, 3]), _stream([10_500, 10_540], [1, 2], sent_ms=10_000)]
    gaps = gaps_of("made", streams, SLO)
    assert (gaps.streams, gaps.tokens, gaps.on_time_share) == (2, 5, 1.0)
    assert (gaps.p50_ms, gaps.p99_ms, gaps.max_ms) == (100, 300, 300)


def test_a_gap_before_a_token_that_was_late_does_not_count() -> None:
    due_ms = 1000 + 4 * 100 + 50  # of token 4, and half a TBT for its way
    gaps = gaps_of("made", [_stream([500, due_ms, 9000], [4, 6, 8])], SLO)
    assert (gaps.tokens, gaps.on_time_share) == (8, 0.75)
    assert gaps.max_ms == due_ms - 500
    assert gaps_of("made", [_stream([500, 501, due_ms + 1], [3, 4, 6])], SLO).max_ms == 1


def test_where_nothing_is_on_time_there_is_no_figure() -> None:
    with pytest.raises(UserError, match="no token was on time at the pace 'made'"):
        gaps_of("made", [_stream([1051, 1052], [1, 2])], Slo(ttft_ns=NS_PER_MS, tbt_ns=NS_PER_MS))
