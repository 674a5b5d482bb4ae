"""The options of `aegis bench report` and `aegis bench timeline`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aegis.admin_client import ADMIN_KEY


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Results, records, spans and memory reports; any of them.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page.")] = Path("report.html"),
) -> int:
    """Make one page of the files of runs in a folder.

    The page needs nothing but itself. docs/reports.md says how files are named and what is shown.

    \b
    Examples:
      aegis bench report results
      aegis bench report results --out comparison.html
    """
    from bench.common.result_files import write
    from bench.report.folder import read
    from bench.report.page import page

    content = page(read(folder)).encode()
    write(out, content)
    print(f"{out}: {len(content) / 1e3:,.0f} kB")
    return 0


def timeline(
    spans: Annotated[Path | None, typer.Argument(metavar="SPANS.jsonl", help="The work of each instance.")] = None,
    records: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The outcome of each request, for arrows from run to run.")
    ] = None,
    decisions: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Decisions, for the reason of each run and switch.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask a running server instead of reading files.")
    ] = None,
    admin_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", envvar=ADMIN_KEY, show_envvar=True, help="Key of that server, if it has one."),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The trace; gzipped where it ends in .gz.")] = Path(
        "trace.json.gz"
    ),
) -> int:
    """Write a trace of the instances' work that ui.perfetto.dev and chrome://tracing open.

    \b
    Examples:
      aegis bench timeline run.spans.jsonl --records run.records.jsonl --out trace.json.gz
      aegis bench timeline --url http://127.0.0.1:8000
    """
    from aegis.telemetry.files import write_bytes
    from bench.report.run import read_run
    from bench.report.trace_events import encode

    run = read_run(spans, records, url, admin_key, decisions)
    write_bytes(out, encode(run))
    print(f"{out}: {len(run.spans)} spans, {len(run.records)} records; open it at https://ui.perfetto.dev")
    return 0
