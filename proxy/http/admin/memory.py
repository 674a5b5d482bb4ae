"""Seeing and moving memory while the server runs: `/debug/memory`, `/debug/memory/limit`, `/debug/memory/trim`."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response
from msgspec import Struct

from aegis.telemetry.memory_report import MemoryReport
from proxy.http.fields import Fields
from proxy.http.openapi import COMMANDING, LOOKING, operation
from proxy.http.parameters import Number, Size, Text, required
from proxy.http.replies import json_reply
from proxy.http.request.body import read_body
from proxy.http.security.authorise import authorise
from proxy.http.settings import queries_of, settings_of

TIMEOUT_S = 30.0
_TIMEOUT_S_MAX = 3600.0


class TrimBody(Fields):
    instance = required(Text(None))
    timeout_s = Number(TIMEOUT_S, low=0.0, high=_TIMEOUT_S_MAX, open_low=True)


class LimitBody(TrimBody):
    limit = required(Size())


class Moved(Struct, frozen=True):
    instance: str
    given_back_bytes: int


router = APIRouter(prefix="/debug/memory", dependencies=[Depends(authorise)])


@router.get("", **operation("All memory of the server", MemoryReport, problems=LOOKING))
async def show(request: Request) -> Response:
    """`MemoryReport` as JSON."""
    return json_reply(await queries_of(request).memory_report())


_PROBLEMS = (*COMMANDING, 504)


@router.post("/limit", **operation("Limit what an instance may hold", Moved, takes=LimitBody, problems=_PROBLEMS))
async def limit(request: Request) -> Response:
    """Body: `instance`, `limit` of its device's memory and, if wanted, `timeout_s`. Answers when it is done."""
    body = await read_body(request, LimitBody, settings_of(request).body_bytes_max)
    instance, nbytes, timeout_s = body.instance, body.limit, body.timeout_s
    body.end()
    given = await queries_of(request).limit_memory(instance, nbytes, timeout_s=timeout_s)
    return json_reply(Moved(instance, given))


@router.post(
    "/trim", **operation("Take back what an instance does not need", Moved, takes=TrimBody, problems=_PROBLEMS)
)
async def trim(request: Request) -> Response:
    """Body: `instance` and, if wanted, `timeout_s`. Answers when it is done."""
    body = await read_body(request, TrimBody, settings_of(request).body_bytes_max)
    instance, timeout_s = body.instance, body.timeout_s
    body.end()
    return json_reply(Moved(instance, await queries_of(request).trim_memory(instance, timeout_s=timeout_s)))
