"""Adding and removing models while the server runs: `POST /models/load`, `POST /models/unload`.

These read checkpoints from the server's disk, so not every client may call them: with an admin key those that send it,
without one those on this machine, but no web page that a browser shows there and nobody a reverse proxy stands for.
"""

from __future__ import annotations

from hmac import compare_digest
from ipaddress import ip_address

from fastapi import APIRouter, Depends, Request, Response
from msgspec import Struct

from aegis.core.errors import UserError
from proxy.http.body import read_fields
from proxy.http.models import card_of, find
from proxy.http.replies import json_reply
from proxy.http.settings import market_of, settings_of

_FOR_SOMEONE_ELSE = ("origin", "forwarded", "via", "x-forwarded-for", "x-real-ip")


class Removed(Struct, frozen=True):
    id: str
    object: str = "model"
    deleted: bool = True


async def authorise(request: Request) -> None:
    """Raises UserError: 401 for a wrong key, 403 for a client from elsewhere."""
    key = settings_of(request).admin_key
    if key is not None:
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not compare_digest(sent.encode(), key.encode()):
            raise UserError("send the admin key as 'Authorization: Bearer …'", status=401, code="invalid_api_key")
    elif not _is_local(request):
        message = "models are added and removed from the server's own machine only, as no admin key is set"
        raise UserError(message, status=403, code="forbidden")


def _is_local(request: Request) -> bool:
    if any(name in request.headers for name in _FOR_SOMEONE_ELSE):
        return False
    try:
        return request.client is not None and ip_address(request.client.host).is_loopback
    except ValueError:
        return False


router = APIRouter(dependencies=[Depends(authorise)])


@router.post("/models/load")
async def load_model(request: Request) -> Response:
    """Body: `source`, a checkpoint directory or hub id, and `name`, what clients shall call it."""
    fields = await read_fields(request, settings_of(request).body_bytes_max)
    source = fields.text("source", None, most_characters=4096)
    name = fields.text("name", None)
    fields.end()
    if source is None:
        raise fields.refusal("source", "is required")
    return json_reply(card_of(await market_of(request).add_model(source, name)))


@router.post("/models/unload")
async def unload_model(request: Request) -> Response:
    fields = await read_fields(request, settings_of(request).body_bytes_max)
    name = fields.required_text("model")
    fields.end()
    find(market_of(request), name)
    await market_of(request).remove_model(name)
    return json_reply(Removed(name))
