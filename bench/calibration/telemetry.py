"""Telemetry of a server, its spans and records: from itself or from files that were kept."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from aegis.admin_client import AdminClient
from aegis.telemetry.files import parse, read_records, read_spans
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span

_TELLING_S = 0.5


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What a server, or a simulation, did and what became of the requests."""

    spans: list[Span]
    records: list[Record]


@dataclass(frozen=True, slots=True)
class Position:
    """A moment in a server's telemetry: what comes after it has these numbers and later ones."""

    span: int
    record: int


def position(client: AdminClient) -> Position:
    """Now."""
    return Position(client.next_number("spans"), client.next_number("records"))


def since(client: AdminClient, start: Position = Position(0, 0)) -> Telemetry:
    """All that the server still knows of the time since. Raises UserError."""
    return Telemetry(
        parse(client.spans(start.span), Span, "/debug/spans"),
        parse(client.records(start.record), Record, "/debug/records"),
    )


def watch(client: AdminClient, seconds: float) -> Telemetry:
    """The events of so many seconds from now."""
    start = position(client)
    time.sleep(seconds)
    return since(client, start)


def settled(client: AdminClient, start: Position) -> Telemetry:
    """The events since then, once instances have reported all: they report a few times a second."""
    time.sleep(_TELLING_S)
    return since(client, start)


def from_files(spans: Path, records: Path | None) -> Telemetry:
    """Stored answers of `/debug/spans` and `/debug/records`. Raises UserError."""
    return Telemetry(read_spans(spans), read_records(records) if records else [])
