"""The recent past of a server: what its instances did, what was decided, and what became of its requests."""

from __future__ import annotations

from aegis.core.decision import Decision
from aegis.telemetry.records import Record
from aegis.telemetry.request_log import RequestLog
from aegis.telemetry.ring import Ring
from aegis.telemetry.spans import Span


class History:
    """`spans`, `records` and `decisions` are how many of each are kept. Times are of the node's monotonic clock."""

    def __init__(self, *, spans: int, records: int, decisions: int, token_times: bool) -> None:
        self.spans: Ring[Span] = Ring(spans)
        self.records: Ring[Record] = Ring(records)
        self.decisions: Ring[Decision] = Ring(decisions)
        self.requests = RequestLog(lambda record: self.records.add((record,)), token_times=token_times)
