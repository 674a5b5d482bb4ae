"""What interference is measured by."""

from __future__ import annotations

import pytest

from aegis.core.clock import NS_PER_S
from aegis.core.errors import UserError
from bench.interference.suite import gaps_s, lengths_of


def test_gaps_are_those_that_a_span_of_time_touches() -> None:
    times_ns = [at * NS_PER_S for at in (0, 1, 3, 7, 8)]
    assert gaps_s(times_ns, until_ns=2 * NS_PER_S) == [1, 2], "the stream stood still when it came"
    assert gaps_s(times_ns, since_ns=2 * NS_PER_S, until_ns=7 * NS_PER_S) == [2, 4]
    assert gaps_s([], until_ns=NS_PER_S) == []


@pytest.mark.parametrize("text", ["", "a", "512,", "0", "-4"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="lengths in tokens"):
        lengths_of(text)
    assert lengths_of("512,4000") == (512, 4000)
