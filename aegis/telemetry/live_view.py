"""A server as it is now, and what it did since it was last looked at: all that the dashboard and `aegis top` show."""

from __future__ import annotations

from msgspec import Struct

from aegis.core.decision import Decision
from aegis.core.ids import InstanceId, ModelId
from aegis.core.role import Role
from aegis.telemetry.history import History
from aegis.telemetry.memory_report import MemoryReport
from aegis.telemetry.model_counts import Tally
from aegis.telemetry.records import Record
from aegis.telemetry.ring import Ring, T
from aegis.telemetry.spans import Span

SPANS_MAX = 4_000
"""The entries of one answer; a viewer that has seen nothing yet, or asks too seldom, gets the last ones."""

_OTHERS_MAX = 1_000


class LiveInstance(Struct, frozen=True):
    """`state` is `up`, `starting`, `drained` or `given up`. The rest is as old as the instance's last word, 0.2 s while
    anything changes. `model` has the turn, `resident` are those whose weights are on the device."""

    instance: InstanceId
    role: Role
    device: int
    state: str
    model: ModelId | None = None
    queued: int = 0
    running: int = 0
    resident: tuple[ModelId, ...] = ()
    loading: tuple[ModelId, ...] = ()


class LiveModel(Struct, frozen=True):
    """`seat` is a number that no other model has or ever had, from 0: models are told apart by it, as in colours. One
    that does not generate text makes vectors, or ranks."""

    seat: int
    state: str
    weights: str
    tally: Tally
    generates: bool = True


class SeenUntil(Struct, frozen=True):
    """The position of a viewer: the numbers of the next span, decision and record."""

    spans: int = 0
    decisions: int = 0
    records: int = 0


class LiveUpdate(Struct, frozen=True):
    """The news since then; `seen` is the position for the next request."""

    seen: SeenUntil
    spans: list[Span]
    decisions: list[Decision]
    records: list[Record]


class Live(Struct, frozen=True):
    """`start` is another number for another start of the server: what was seen before is of no use then. Times of spans
    are of the same clock as `now_ns`."""

    start: int
    version: str
    policy: str
    now_ns: int
    instances: list[LiveInstance]
    models: list[LiveModel]
    memory: MemoryReport
    news: LiveUpdate


def updates_since(history: History, seen: SeenUntil) -> LiveUpdate:
    """The latest of each kind, no more than a viewer can show."""
    return LiveUpdate(
        SeenUntil(history.spans.next, history.decisions.next, history.records.next),
        _latest(history.spans, seen.spans, SPANS_MAX),
        _latest(history.decisions, seen.decisions, _OTHERS_MAX),
        _latest(history.records, seen.records, _OTHERS_MAX),
    )


def _latest(ring: Ring[T], since: int, most: int) -> list[T]:
    return ring.since(max(since, ring.next - most))
