"""The times in which a fault is noticed and mended, from the server's log, its decisions and its records."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime

import msgspec

from aegis.core.clock import NS_PER_S
from aegis.core.decision import Decision, DecisionKind
from aegis.core.ids import InstanceId, RequestId
from aegis.telemetry.records import Record
from tests.faults.trial import Trial
from tests.live.server import Server, eventually

DETECTION_S = 3.0
RECOVERY_S = 2.0
"""After the detection."""

_LINE = re.compile(r"^(\d{4}-\S+Z) \w+ \S+ (.*)$", re.MULTILINE)
_LOG_S = 0.001  # how exact its times are


@dataclass(frozen=True, slots=True)
class Row:
    """Of one trial. None: there is nothing to detect, or nothing that was lost."""

    fault: str
    moment: float
    detection_s: float | None
    recovery_s: float | None
    retried: int


class Figures:
    """Of all trials. A `strict` one fails where something took too long, which on a busy machine it may."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self.rows: list[Row] = []

    def add(
        self, fault: str, trial: Trial, *, detection_s: float | None = None, recovery_s: float | None = None
    ) -> None:
        """Adds the measurements of a trial."""
        self.rows.append(Row(fault, trial.moment, detection_s, recovery_s, len(trial.broken)))
        if not self._strict:
            return
        assert (detection_s or 0.0) <= DETECTION_S, f"{fault}: noticed after {detection_s:.2f} s"
        assert (recovery_s or 0.0) <= RECOVERY_S, f"{fault}: mended after {recovery_s:.2f} s"

    def lines(self) -> list[str]:
        """As a table."""
        lines = [f"{'fault':44} {'at':>5} {'detected':>10} {'recovered':>10} {'retried':>8}"]
        for row in self.rows:
            detected, recovered = _seconds(row.detection_s), _seconds(row.recovery_s)
            lines.append(f"{row.fault:44} {row.moment:5.0%} {detected:>10} {recovered:>10} {row.retried:8}")
        return lines


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def noticed_s(trial: Trial, pattern: str) -> float:
    """The time from the strike to the line in the log."""
    return eventually(lambda: _first(trial.server, pattern, trial.struck_s), f"the log says {pattern}", 30.0)


def _first(server: Server, pattern: str, since_s: float) -> float | None:
    for stamp, text in _LINE.findall(server.output()):
        at_s = datetime.fromisoformat(stamp).timestamp()
        if at_s >= since_s - _LOG_S and re.search(pattern, text):
            return max(at_s - since_s, 0.0)
    return None


def replaced_s(trial: Trial, instance: str, detection_s: float) -> float:
    """The time from the detection until all requests of the lost instance had a place elsewhere and the first of them
    got its next token."""
    detected_ns = round((trial.struck_s + detection_s - time.time() + time.monotonic()) * NS_PER_S)
    server = trial.server
    records = eventually(lambda: _all_ended(server, len(trial.clients)), "what became of requests is told")
    tokens_ns = {record.request: record.token_times_ns for record in records}
    again_ns, next_ns = [detected_ns], list[int]()
    for request, places in _places(server).items():
        before = [place for place in places if place[0] <= detected_ns]
        after = [at_ns for at_ns, _ in places if at_ns > detected_ns]
        if before and after and before[-1][1] == instance:
            again_ns.append(after[0])
            next_ns += [at_ns for at_ns in tokens_ns.get(request, ()) if at_ns > detected_ns][:1]
    recovered_ns = max(max(again_ns), min(next_ns, default=detected_ns))
    return (recovered_ns - detected_ns) / NS_PER_S


def _all_ended(server: Server, count: int) -> list[Record]:
    """The records of requests, once none is running any more."""
    records = msgspec.json.Decoder(Record).decode_lines(server.get("/debug/records?times=1").content)
    metrics = server.metrics()
    running = metrics.total("num_requests_waiting") + metrics.total("num_requests_running")
    return records if len(records) >= count and not running else []


def _places(server: Server) -> dict[RequestId, list[tuple[int, InstanceId]]]:
    """The time and the place of each placement."""
    places = defaultdict[RequestId, list[tuple[int, InstanceId]]](list)
    for decision in msgspec.json.Decoder(Decision).decode_lines(server.get("/debug/decisions").content):
        if decision.kind is DecisionKind.PLACE:
            for request in decision.requests:
                places[request].append((decision.at_ns, decision.instance))
    return {request: sorted(of_one) for request, of_one in places.items()}
