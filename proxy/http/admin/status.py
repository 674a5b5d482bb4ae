"""The state of the server: `/health`, `/ready`, `/metrics`, `/version`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

import aegis
from aegis.core.errors import UserError
from proxy.http.errors import error_reply
from proxy.http.openapi import PLAIN, operation
from proxy.http.replies import json_reply
from proxy.http.settings import queries_of, scrapes_of

router = APIRouter()
_LOOKED_AT = ["GET", "HEAD"]  # probes of some load balancers send HEAD


class Status(Struct, frozen=True):
    status: str


class Version(Struct, frozen=True):
    version: str


_OPERATION = operation("200: it is well", Status, problems={401: "No key, or none that is known", 503: "It is not"})


@router.api_route("/health", methods=_LOOKED_AT, **_OPERATION)
async def health(request: Request) -> Response:
    """200 while the server can go on."""
    return _status(*await queries_of(request).healthy())


@router.api_route("/ready", methods=_LOOKED_AT, **_OPERATION)
async def ready(request: Request) -> Response:
    """200 only when every launched instance serves."""
    return _status(*await queries_of(request).ready())


def _status(well: bool, reason: str) -> Response:
    """A problem is answered and not raised, because a status check is no request that is turned away."""
    if well:
        return json_reply(Status("ok"))
    return error_reply(UserError(reason, status=503, code="unavailable", kind="server_error"))


@router.get("/metrics", **operation("For Prometheus", kinds=(PLAIN,)))
async def metrics(request: Request) -> Response:
    told = await scrapes_of(request).answer(queries_of(request).metrics)
    return Response(told, media_type=CONTENT_TYPE_PLAIN_0_0_4)


@router.api_route("/version", methods=_LOOKED_AT, **operation("Which aegis this is", Version))
async def version(request: Request) -> Response:
    return json_reply(Version(aegis.__version__))
