"""Records of requests, as the proxy saw them."""

from __future__ import annotations

import pytest

from aegis.core.ids import ModelId, RequestId
from aegis.core.model import Slo
from aegis.telemetry.history import RequestLog
from aegis.telemetry.records import Record

SLO = Slo(ttft_ns=100, tbt_ns=10)
MODEL = ModelId("m")


def logged(token_times: bool = False) -> tuple[RequestLog, list[Record]]:
    records: list[Record] = []
    log = RequestLog(records.append, token_times=token_times)
    log.arrived(RequestId(7), MODEL, SLO, 1_000, prompt_tokens=5, max_tokens=9)
    return log, records


@pytest.mark.parametrize("token_times", [False, True])
def test_a_record_has_the_times_of_its_tokens(token_times: bool) -> None:
    log, records = logged(token_times)
    log.tokens(RequestId(7), 1_100, 1)  # due then
    log.tokens(RequestId(7), 1_115, 2)  # due at 1 110 and 1 120
    assert records == []
    log.end(RequestId(7), "finished")
    times = (1_100, 1_115, 1_115) if token_times else ()
    assert records == [Record(RequestId(7), MODEL, 1_000, 5, 9, "finished", 2, 1_100, 1_115, times)]


def test_a_request_without_tokens_has_no_times() -> None:
    log, records = logged()
    log.end(RequestId(7), "cancelled")
    assert records == [Record(RequestId(7), MODEL, 1_000, 5, 9, "cancelled", 0)]
