"""The recent past of the server, as JSON lines: `/debug/spans`, `/debug/records`, `/debug/decisions`; and the live
view, with the news since the last request: `/debug/live`.

`since` is the number of the first entry wanted, 0 if left out; the header `Aegis-Next` is the number for the next
request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import StreamingResponse

from aegis.core.errors import UserError
from aegis.telemetry.live_view import Live, SeenUntil
from aegis.telemetry.node_report import NodeReport
from aegis.telemetry.records import Record
from proxy.http.openapi import LINES, LOOKING, operation
from proxy.http.replies import json_reply
from proxy.http.security.authorise import authorise
from proxy.http.settings import queries_of

T = TypeVar("T")

NEXT = "Aegis-Next"
_FRESH = {"cache-control": "no-store"}
_PART = 1_000  # lines that are encoded without a pause for others
_DIGITS_MAX = 18
_SHOWN_CHARS = 40
_lines = msgspec.json.Encoder().encode_lines


async def _refuse_unknown(request: Request) -> None:
    """Raises UserError for a query parameter that the route does not declare."""
    declared = [each["name"] for each in (request.scope["route"].openapi_extra or {}).get("parameters", ())]
    for name in request.query_params:
        if name not in declared:
            shown, known = name[:_SHOWN_CHARS], ", ".join(declared) or "none"
            raise UserError(f"the query parameter {shown!r} is not known here; known: {known}", param=shown)


router = APIRouter(prefix="/debug", dependencies=[Depends(authorise), Depends(_refuse_unknown)])


def _number(name: str) -> dict[str, Any]:
    """A query parameter that `_since` reads."""
    return {
        "name": name,
        "in": "query",
        "schema": {"type": "integer", "minimum": 0, "exclusiveMaximum": 10**_DIGITS_MAX},
    }


_SINCE, _TIMES = _number("since"), {"name": "times", "in": "query", "schema": {"enum": ["0", "1"]}}
_SEEN = tuple(map(_number, SeenUntil.__struct_fields__))


@router.get("/spans", **operation("What instances did", kinds=(LINES,), problems=LOOKING, parameters=(_SINCE,)))
async def spans(request: Request) -> Response:
    """One `Span` a line, as an array of its fields, in order of arrival at the node."""
    return _reply(await queries_of(request).spans(_since(request)), list)


@router.get(
    "/records", **operation("What became of requests", kinds=(LINES,), problems=LOOKING, parameters=(_SINCE, _TIMES))
)
async def records(request: Request) -> Response:
    """One `Record` a line, in order of end; with the times of all tokens where `times=1` asks for them."""
    times = request.query_params.get("times", "0")
    if times not in ("0", "1"):
        raise UserError(f"times should be 0 or 1, not {times[:_SHOWN_CHARS]!r}", param="times")
    wants_times = times == "1"
    return _reply(await queries_of(request).records(_since(request)), list if wants_times else _without_times)


@router.get(
    "/decisions", **operation("What was decided and why", kinds=(LINES,), problems=LOOKING, parameters=(_SINCE,))
)
async def decisions(request: Request) -> Response:
    """One `Decision` a line, as an object, in order of arrival at the node."""
    return _reply(await queries_of(request).decisions(_since(request)), list)


@router.get("/live", **operation("All that watchers show", Live, problems=LOOKING, parameters=_SEEN))
async def live(request: Request) -> Response:
    """`Live` as JSON. `spans`, `decisions` and `records` are what `news.seen` of the last answer says."""
    seen = SeenUntil(*(_since(request, each) for each in SeenUntil.__struct_fields__))
    return Response(await queries_of(request).live(seen), media_type="application/json", headers=_FRESH)


@router.get("/node", **operation("What the server consists of", NodeReport, problems=LOOKING))
async def node(request: Request) -> Response:
    """`NodeReport` as JSON: what a simulation of this server has to know."""
    return json_reply(await queries_of(request).report())


def _without_times(records: Sequence[Record]) -> list[Record]:
    return [msgspec.structs.replace(record, token_times_ns=()) for record in records]


def _reply(told: tuple[Sequence[T], int], shown: Callable[[Sequence[T]], list[T]]) -> Response:
    entries, following = told

    def parts() -> Iterator[bytes]:
        for at in range(0, len(entries), _PART):
            yield _lines(shown(entries[at : at + _PART]))

    return StreamingResponse(parts(), media_type="application/jsonl", headers={NEXT: str(following)})


def _since(request: Request, name: str = "since") -> int:
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        raise UserError(f"{name} should be a whole number, not {text[:_SHOWN_CHARS]!r}", param=name)
    return int(text)
