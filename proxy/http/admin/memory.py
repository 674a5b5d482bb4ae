"""Seeing and moving memory while the server runs: `/debug/memory`, `/debug/memory/limit`, `/debug/memory/trim`."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response
from msgspec import Struct

from proxy.http.fields import Fields
from proxy.http.replies import json_reply
from proxy.http.request.body import read_fields
from proxy.http.security.authorise import authorise
from proxy.http.settings import queries_of, settings_of

TIMEOUT_S = 30.0
_TIMEOUT_S_MAX = 3600.0


class Moved(Struct, frozen=True):
    instance: str
    given_back_bytes: int


router = APIRouter(prefix="/debug/memory", dependencies=[Depends(authorise)])


@router.get("")
async def show(request: Request) -> Response:
    """`MemoryReport` as JSON."""
    return json_reply(await queries_of(request).memory_report())


@router.post("/limit")
async def limit(request: Request) -> Response:
    """Body: `instance`, `limit` of its device's memory and, if wanted, `timeout_s`. Answers when it is done."""
    fields = await read_fields(request, settings_of(request).body_bytes_max)
    instance, nbytes, timeout_s = fields.required_text("instance"), fields.required_size("limit"), _timeout_s(fields)
    fields.end()
    given = await queries_of(request).limit_memory(instance, nbytes, timeout_s=timeout_s)
    return json_reply(Moved(instance, given))


@router.post("/trim")
async def trim(request: Request) -> Response:
    """Body: `instance` and, if wanted, `timeout_s`. Answers when it is done."""
    fields = await read_fields(request, settings_of(request).body_bytes_max)
    instance, timeout_s = fields.required_text("instance"), _timeout_s(fields)
    fields.end()
    return json_reply(Moved(instance, await queries_of(request).trim_memory(instance, timeout_s=timeout_s)))


def _timeout_s(fields: Fields) -> float:
    return fields.number("timeout_s", TIMEOUT_S, low=0.0, high=_TIMEOUT_S_MAX, open_low=True)
