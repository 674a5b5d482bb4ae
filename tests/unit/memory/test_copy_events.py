"""Events as numbers: a stream completes its copies in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.effects import StreamName
from aegis.core.request import EventHandle
from memory.copy_events import Transfers

WORDS = {name: 10 + i for i, name in enumerate(StreamName)}


@given(st.lists(st.tuples(st.sampled_from(list(StreamName)), st.integers(0, 3))))
def test_an_event_has_passed_exactly_when_its_stream_got_that_far(moves: list[tuple[StreamName, int]]) -> None:
    """0: submit a copy; n: the next n copies complete."""
    transfers = Transfers(WORDS)
    events: dict[StreamName, list[EventHandle]] = {name: [] for name in StreamName}
    completed = dict.fromkeys(StreamName, 0)
    for stream, count in moves:
        if count == 0:
            events[stream].append(transfers.next(stream))
        else:
            completed[stream] = min(completed[stream] + count, len(events[stream]))
            transfers.progress(stream, completed[stream])
        for name in StreamName:
            assert events[name] == [EventHandle(WORDS[name], n + 1) for n in range(len(events[name]))]
            assert [transfers.passed(e) for e in events[name]] == [
                n < completed[name] for n in range(len(events[name]))
            ]
        in_flight = {name: len(events[name]) - completed[name] for name in StreamName}
        assert transfers.by_stream() == in_flight
        assert transfers.in_flight == sum(in_flight.values())


@pytest.mark.parametrize("value", [0, 3])
def test_progress_neither_goes_back_nor_beyond_what_was_submitted(value: int) -> None:
    transfers = Transfers(WORDS)
    transfers.next(StreamName.SWAP_IN)
    transfers.next(StreamName.SWAP_IN)
    transfers.progress(StreamName.SWAP_IN, 1)
    with pytest.raises(AssertionError):
        transfers.progress(StreamName.SWAP_IN, value)
