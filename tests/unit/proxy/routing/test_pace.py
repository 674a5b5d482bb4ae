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


def test_streams_lack_what_they_want_and_does_not_come() -> None:
    assert paced(SLO.tbt_ns // 2, 1, 2).lack(HERE, LONG_NS) == 0
    for times in (2, 4):
        found = paced(times * SLO.tbt_ns, 1, 2, until_ns=4 * LONG_NS).lack(HERE, 4 * LONG_NS)
        assert found == pytest.approx(1 - 1 / times, rel=0.1)


def test_what_comes_beside_others_windows_does_not_make_up_for_a_lack() -> None:
    """Windows in turn with no token, and with twice as many as are wanted."""
    pace = Pace()
    for now_ns in range(0, 10 * LONG_NS, SLO.tbt_ns // 4):
        if now_ns // SLO.ttft_ns % 2:
            pace.tokens(HERE, RequestId(1), 1, SLO, now_ns)
    assert 0.3 < pace.lack(HERE, 10 * LONG_NS) < 0.7


def test_streams_want_what_their_model_is_set_to_while_they_are_there() -> None:
    tight = Slo(ttft_ns=SLO.ttft_ns, tbt_ns=SLO.tbt_ns // 4)
    pace, until_ns = paced(SLO.tbt_ns // 2, 1, 2), 4 * LONG_NS
    assert pace.lack(HERE, LONG_NS) == 0
    for now_ns in range(LONG_NS, until_ns + 1, SLO.tbt_ns // 2):
        for request in (1, 2):
            pace.tokens(HERE, RequestId(request), 1, tight, now_ns)
    assert pace.lack(HERE, until_ns) == pytest.approx(0.5, rel=0.1)


def test_nobody_lacks_anything_because_a_stream_with_a_shorter_deadline_joins_those_that_are_on_time() -> None:
    patient = Slo(ttft_ns=10 * NS_PER_S, tbt_ns=SLO.tbt_ns)
    hasty = Slo(ttft_ns=NS_PER_S, tbt_ns=SLO.tbt_ns)
    pace, joins_ns = Pace(), round(15.5 * NS_PER_S)
    for now_ns in range(0, 2 * joins_ns, SLO.tbt_ns // 2):
        for request in range(10):
            pace.tokens(HERE, RequestId(request), 1, patient, now_ns)
        if now_ns >= joins_ns:
            pace.tokens(HERE, RequestId(10), 1, hasty, now_ns)
        assert pace.lack(HERE, now_ns) == 0
    assert pace.lack(HERE, 2 * joins_ns + 3 * hasty.ttft_ns) > 0.3, "but they do once nothing has come for long"


def test_streams_that_have_just_begun_lack_nothing() -> None:
    pace = paced(SLO.tbt_ns // 2, 1)
    for request in range(2, 40):
        pace.tokens(HERE, RequestId(request), 1, SLO, LONG_NS)
    assert pace.lack(HERE, LONG_NS + SLO.tbt_ns) == 0
    assert pace.lack(HERE, LONG_NS + 9 * SLO.ttft_ns) > 0.8, "but they do once nothing has come for long"


def test_a_lack_is_forgotten_when_tokens_come_again_and_where_there_are_no_streams() -> None:
    for served in (True, False):
        pace = paced(4 * SLO.tbt_ns, 1)
        before = pace.lack(HERE, LONG_NS)
        if not served:
            pace.left(HERE, RequestId(1), LONG_NS)
        for now_ns in range(LONG_NS, 2 * LONG_NS, SLO.tbt_ns // 2):
            if served:
                pace.tokens(HERE, RequestId(1), 1, SLO, now_ns)
        pace.tokens(HERE, RequestId(2), 1, SLO, 2 * LONG_NS)
        assert before > 0.5
        assert pace.lack(HERE, 2 * LONG_NS) < before / 3


def test_an_instance_that_is_gone_or_never_made_a_token_lacks_nothing() -> None:
    pace = paced(4 * SLO.tbt_ns, 1)
    pace.left(HERE, RequestId(2), LONG_NS)
    pace.down(HERE)
    assert pace.lack(HERE, LONG_NS) == 0


def test_less_than_a_window_tells_nothing() -> None:
    """The tokens of a first run come at its end."""
    pace = Pace()
    pace.tokens(HERE, RequestId(1), 1, SLO, 0)
    assert pace.lack(HERE, SLO.ttft_ns - 1) == 0
    assert pace.lack(HERE, SLO.ttft_ns + SLO.tbt_ns) > 0.2
