"""Adding and removing models while the server runs: `POST /models/load`, `POST /models/unload`.

These read checkpoints from the server's disk, so not every client may call them.
"""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response
from msgspec import Struct

from proxy.http.authorise import authorise
from proxy.http.body import read_fields
from proxy.http.models import card_of, find
from proxy.http.replies import json_reply
from proxy.http.settings import desk_of, market_of, settings_of


class Removed(Struct, frozen=True):
    id: str
    object: str = "model"
    deleted: bool = True


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
    return json_reply(card_of(await desk_of(request).add_model(source, name)))


@router.post("/models/unload")
async def unload_model(request: Request) -> Response:
    fields = await read_fields(request, settings_of(request).body_bytes_max)
    name = fields.required_text("model")
    fields.end()
    find(market_of(request), name)
    await desk_of(request).remove_model(name)
    return json_reply(Removed(name))
