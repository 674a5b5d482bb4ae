"""`aegis explain`: the decisions of a running server, or of a simulation's file, and their reasons."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aegis.admin_client import AdminClient
from aegis.core.clock import NS_PER_S
from aegis.core.errors import UserError
from aegis.server_url import server_url, url_help

if TYPE_CHECKING:
    from aegis.core.decision import Decision

_POLL_S = 0.5
_LAST = 20
_NAMED = 8
_NOTHING = "no decision is remembered: none was made yet, or none is kept (telemetry.decisions)"


def explain(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Of `aegis simulate --decisions`, in place of a server.")
    ] = None,
    instance: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only what takes effect there, like mixed-0.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only about this model, also where it came second.")
    ] = None,
    request: Annotated[
        int | None, typer.Option(metavar="N", help="Only about this request, by its number in `/debug/records`.")
    ] = None,
    last: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Number of decisions. [default: 20; with --request: all]"),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with new ones until Ctrl-C.")] = False,
    json: Annotated[bool, typer.Option("--json", help="As JSON, one decision a line, times in nanoseconds.")] = False,
    url: Annotated[str | None, typer.Option("--url", metavar="URL", help=url_help("Address of the server."))] = None,
) -> int:
    """Show decisions and their reasons: places of requests, turns, prefills, evictions and refusals.

    Each line has the slack, the cost and the alternative that lost. A server remembers its last decisions
    (`telemetry.decisions`); the first column is seconds of its clock, or of the simulation. docs/explain.md has more.

    \b
    Examples:
      aegis explain
      aegis explain --model bakery-qwen2 --last 50
      aegis explain --request 12
      aegis explain --instance mixed-0 --follow
      aegis explain decisions.jsonl.gz --request 12
    """
    if file is not None and (url is not None or follow):
        raise UserError("--url and --follow are of a running server: leave out FILE")
    asked = {"instance": instance, "model": model, "request": request}
    wanted = _filter(instance, model, request)
    most = last or (_LAST if request is None else None)  # a request's way begins with its place
    if file is not None:
        from aegis.telemetry.files import read_decisions

        line: Iterable[list[Decision]] = [read_decisions(file)]
    else:
        line = _decisions_of(AdminClient(server_url() if url is None else url), follow=follow)
    for number, decisions in enumerate(line):
        found = [each for each in decisions if wanted(each)]
        if not found and not follow:
            _explain_nothing(decisions, {name: value for name, value in asked.items() if value is not None})
        _show(found if number or most is None else found[-most:], json=json)
    return 0


def _filter(instance: str | None, model: str | None, request: int | None) -> Callable[[Decision], bool]:
    def wanted(decision: Decision) -> bool:
        return (
            instance in (None, decision.instance)
            and model in (None, decision.model, decision.why.lost)
            and (request is None or request in decision.requests)
        )

    return wanted


def _explain_nothing(decisions: Sequence[Decision], asked: Mapping[str, object]) -> None:
    """Raises UserError if something was asked for in particular."""
    if not decisions:
        if asked:
            raise UserError(_NOTHING)
        print("aegis:", _NOTHING, file=sys.stderr)
        return
    names: dict[str, set[Any]] = {
        "instance": {each.instance for each in decisions},
        "model": {each.model for each in decisions},
        "request": {number for each in decisions for number in each.requests},
    }
    for option, value in asked.items():
        if value not in names[option]:
            last = ", ".join(map(str, sorted(names[option])[-_NAMED:]))
            hint = f"; there are some about {last}" if last else ""
            raise UserError(f"no decision is about {option} {value}{hint}", param=option)
    raise UserError(f"no decision is about {' and '.join(f'{option} {value}' for option, value in asked.items())}")


def _decisions_of(server: AdminClient, *, follow: bool) -> Iterator[list[Decision]]:
    """Decisions in order of time, as far as they have come in by then."""
    from aegis.core.decision import Decision
    from aegis.telemetry.files import parse

    since = 0
    while True:
        content, since = server.decisions(since)
        yield sorted(parse(content, Decision, "the server's answer"), key=lambda each: each.at_ns)
        if not follow:
            return
        time.sleep(_POLL_S)


def _show(decisions: Iterable[Decision], *, json: bool) -> None:
    import msgspec

    for each in decisions:
        line = f"{each.at_ns / NS_PER_S:12.4f} {each.instance:10} {each.line}"
        print(msgspec.json.encode(each).decode() if json else line, flush=True)
