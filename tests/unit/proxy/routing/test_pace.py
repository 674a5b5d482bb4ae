"""How far streams of an instance are behind, by the tokens that come."""

from __future__ import annotations

import pytest

from aegis.core.clock import NS_PER_MS, NS_PER_S
from aegis.core.ids import InstanceId, RequestId
from aegis.core.model import Slo
from proxy.routing.pace import Pace

HERE = InstanceId("mixed-0")
SLO = Slo(ttft_ns=2 * NS_PER_S, tbt_ns=100 * NS_PER_MS)
LONG_NS = 10 * NS_PER_S


def paced(every_ns: int, *requests: int, until_ns: int = LONG_NS) -> Pace:
    """Streams that each had a token so often."""
    pace = Pace()
    for now_ns in range(0, until_ns + 1, every_ns):
        for request in requests:
            pace.tokens(HERE, RequestId(request), 1, SLO, now_ns)
    return pace


def test_streams_are_as_far_behind_as_tokens_come_late() -> None:
    assert paced(SLO.tbt_ns // 2, 1, 2).stretch(HERE, LONG_NS) == 0
    for times in (2, 4):
        found = paced(times * SLO.tbt_ns, 1, 2).stretch(HERE, LONG_NS)
        assert found == pytest.approx(times, rel=0.2)


def test_those_who_wait_for_a_first_token_want_as_much() -> None:
    pace = paced(2 * SLO.tbt_ns, 1, 2)
    assert pace.stretch(HERE, LONG_NS, coming=2) == pytest.approx(2 * pace.stretch(HERE, LONG_NS))
    assert paced(SLO.tbt_ns // 2, 1).stretch(HERE, LONG_NS, coming=9) == 0


def test_streams_want_what_their_model_is_set_to_while_they_are_there() -> None:
    tight = Slo(ttft_ns=SLO.ttft_ns, tbt_ns=SLO.tbt_ns // 4)
    pace, until_ns = paced(SLO.tbt_ns // 2, 1, 2), 2 * LONG_NS
    assert pace.stretch(HERE, LONG_NS) == 0
    for now_ns in range(LONG_NS, until_ns + 1, SLO.tbt_ns // 2):
        for request in (1, 2):
            pace.tokens(HERE, RequestId(request), 1, tight, now_ns)
    assert pace.stretch(HERE, until_ns) == pytest.approx(2, rel=0.2)
    for request in (1, 2):
        pace.left(HERE, RequestId(request), until_ns)
    assert pace.stretch(HERE, until_ns) == 0


def test_nobody_is_behind_because_a_stream_with_a_shorter_deadline_joins_those_that_are_on_time() -> None:
    patient = Slo(ttft_ns=10 * NS_PER_S, tbt_ns=SLO.tbt_ns)
    hasty = Slo(ttft_ns=NS_PER_S, tbt_ns=SLO.tbt_ns)
    pace, joins_ns = Pace(), round(15.5 * NS_PER_S)
    for now_ns in range(0, 2 * joins_ns, SLO.tbt_ns // 2):
        for request in range(10):
            pace.tokens(HERE, RequestId(request), 1, patient, now_ns)
        if now_ns >= joins_ns:
            pace.tokens(HERE, RequestId(10), 1, hasty, now_ns)
        assert pace.stretch(HERE, now_ns) == 0
    assert pace.stretch(HERE, 2 * joins_ns + 3 * hasty.ttft_ns) > 1, "but they are once nothing has come for long"


def test_streams_that_have_just_begun_are_not_behind() -> None:
    pace = paced(SLO.tbt_ns // 2, 1)
    for request in range(2, 40):
        pace.tokens(HERE, RequestId(request), 1, SLO, LONG_NS)
    assert pace.stretch(HERE, LONG_NS + SLO.tbt_ns) == 0
    assert pace.stretch(HERE, LONG_NS + 3 * SLO.ttft_ns) > 100, "but they are once nothing has come for long"


def test_where_streams_have_left_nobody_is_behind() -> None:
    pace = paced(4 * SLO.tbt_ns, 1, 2, 3)
    for request in (1, 2, 3):
        before = pace.stretch(HERE, LONG_NS)
        pace.left(HERE, RequestId(request), LONG_NS)
        assert pace.stretch(HERE, LONG_NS) < before
        assert pace.streams(HERE) == 3 - request
    pace.tokens(HERE, RequestId(4), 1, SLO, LONG_NS)
    assert pace.stretch(HERE, LONG_NS + 1) == 0, "and what was long ago counts no more"


def test_the_past_counts_for_no_more_than_two_windows() -> None:
    pace = paced(4 * SLO.tbt_ns, 1)
    for now_ns in range(LONG_NS, LONG_NS + 2 * SLO.ttft_ns + 1, SLO.tbt_ns // 2):
        pace.tokens(HERE, RequestId(1), 1, SLO, now_ns)
    assert pace.stretch(HERE, LONG_NS + 2 * SLO.ttft_ns) == 0


def test_an_instance_that_is_gone_is_not_behind() -> None:
    pace = paced(4 * SLO.tbt_ns, 1)
    pace.down(HERE)
    assert (pace.stretch(HERE, LONG_NS), pace.streams(HERE)) == (0, 0)


def test_less_than_a_window_tells_nothing() -> None:
    """The tokens of a first run come at its end."""
    pace = Pace()
    pace.tokens(HERE, RequestId(1), 1, SLO, 0)
    assert pace.stretch(HERE, SLO.ttft_ns - 1, coming=1) == 0
    assert pace.stretch(HERE, SLO.ttft_ns + SLO.tbt_ns) > 10
