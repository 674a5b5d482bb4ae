"""A run from files, or from a server that is running."""

from __future__ import annotations

from pathlib import Path

from aegis.admin_client import AdminClient
from aegis.core.decision import Decision
from aegis.core.errors import UserError
from aegis.telemetry.files import parse, read_decisions, read_records, read_spans
from aegis.telemetry.records import Record
from aegis.telemetry.spans import Span
from bench.report.run import Run


def read(
    spans: Path | None, records: Path | None, url: str | None, key: str | None, decisions: Path | None = None
) -> Run:
    """Raises UserError: where neither or both are given, where a file is broken, and where nothing was done yet."""
    if (spans is None) == (url is None):
        raise UserError("give a file of spans, or the --url of a server")
    if spans is not None:
        run = Run(
            spans.name,
            read_spans(spans),
            read_records(records) if records else (),
            decisions=read_decisions(decisions) if decisions else (),
        )
    else:
        assert url is not None
        if records is not None or decisions is not None:
            raise UserError("--records and --decisions are files beside one of spans; a server is asked for its own")
        run = _fetched(url, key)
    if not run.spans:
        raise UserError(f"{run.name}: holds no spans")
    return run


def _fetched(url: str, key: str | None) -> Run:
    server = AdminClient(url, key)
    return Run(
        url,
        parse(server.spans(), Span, f"{url}/debug/spans"),
        parse(server.records(), Record, f"{url}/debug/records"),
        decisions=parse(server.decisions()[0], Decision, f"{url}/debug/decisions"),
    )
