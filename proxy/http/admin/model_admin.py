"""Adding, changing, evicting and removing models while the server runs: `POST /models/load`, `/models/update`,
`/models/evict`, `/models/unload`; and seeing it: `GET /models/sse`.

These read checkpoints from the server's disk, so not every client may call them.
"""

from __future__ import annotations

import asyncio
from typing import cast

from fastapi import APIRouter, Depends, Request, Response
from msgspec import Struct

from aegis.core.clock import NS_PER_MS
from aegis.core.limits import Limits
from aegis.core.model import PACES, SLO_NS_MAX, SLO_NS_MIN, ModelChange, Pace
from aegis.core.request import PRIORITY_MAX
from aegis.telemetry.registration import Waiting
from proxy.http.client_disconnect import while_connected
from proxy.http.fields import Fields
from proxy.http.openai.models import ComingCard, ModelCard, card_of, coming_cards, find
from proxy.http.openapi import COMMANDING, EVENTS, LOOKING, operation
from proxy.http.parameters import Flag, Integer, Nested, Number, OneOf, Text
from proxy.http.replies import json_reply
from proxy.http.request.body import ModelBody, read_body
from proxy.http.security.authorise import authorise
from proxy.http.settings import keep_alive_of, market_of, queries_of, settings_of
from proxy.http.streaming.event_stream import Emit, EventStream, event

LIMIT_MAX = 1 << 40
_LOOK_S = 0.2


class LoadBody(Fields):
    source = Text(None, most_characters=4096, required=True)
    name = Text(None)
    lazy = Flag(False)
    base = Text(None)


class SloFields(Fields):
    ttft_ms = Number(None, low=SLO_NS_MIN / NS_PER_MS, high=SLO_NS_MAX / NS_PER_MS)
    tbt_ms = Number(None, low=SLO_NS_MIN / NS_PER_MS, high=SLO_NS_MAX / NS_PER_MS)
    gap_ms = Number(None, low=SLO_NS_MIN / NS_PER_MS, high=SLO_NS_MAX / NS_PER_MS)


class LimitsFields(Fields):
    requests_per_minute = Integer(None, low=0, high=LIMIT_MAX, about="0: no limit")
    tokens_per_minute = Integer(None, low=0, high=LIMIT_MAX, about="0: no limit")
    concurrent = Integer(None, low=0, high=LIMIT_MAX, about="0: no limit")


class UpdateBody(ModelBody):
    slo = Nested(SloFields)
    limits = Nested(LimitsFields)
    priority = Integer(None, low=-PRIORITY_MAX, high=PRIORITY_MAX)
    pin = Flag(None)
    pace = OneOf(PACES)


class Gone(Struct, frozen=True):
    id: str
    state: str = "removed"


class Removed(Struct, frozen=True):
    id: str
    object: str = "model"
    deleted: bool = True


router = APIRouter(dependencies=[Depends(authorise)])


@router.post(
    "/models/load",
    **operation("Serve a checkpoint or an address", ModelCard, takes=LoadBody, problems=(*COMMANDING, 503)),
)
async def load_model(request: Request) -> Response:
    """Body: `source`, a checkpoint directory, GGUF file, hub id or address (`hf://`, `https://`, `s3://`), `name`, what
    clients shall call it, and `lazy`, whether its weights are read or fetched at its first request only. A LoRA adapter
    is a `source` too: `base` is the model here that it is run with; left out, the one that the adapter itself names."""
    body = await read_body(request, LoadBody, settings_of(request).body_bytes_max)
    source, name, lazy, base = body.source, body.name, body.lazy, body.base
    body.end()
    if source is None:
        raise body.invalid("source", "is required")
    adding = queries_of(request).add_model(source, name, lazy=lazy, base=base)  # it ends when its client has left
    added = await while_connected(request.receive, adding)
    if isinstance(added, Waiting):
        return json_reply(ComingCard(added.model, added.root, "its weights are fetched at its first request", "lazy"))
    return json_reply(card_of(added))


@router.get("/models/sse", **operation("What becomes of models, as it happens", kinds=(EVENTS,), problems=LOOKING))
async def watch_models(request: Request) -> Response:
    """An event for each model at first, and one whenever something of it changes; `{"id", "state": "removed"}` when it
    is gone."""
    market = market_of(request)

    async def write(emit: Emit) -> None:
        told: dict[str, ModelCard | ComingCard] = {}
        while True:
            now: dict[str, ModelCard | ComingCard] = {card.id: card for card in coming_cards(market)}
            now |= {name: card_of(served) for name, served in market.models().items()}
            for name in told.keys() - now.keys():
                await emit(event(Gone(name)))
            for name, card in now.items():
                if told.get(name) != card:
                    await emit(event(card))
            told = now
            await asyncio.sleep(_LOOK_S)

    return EventStream(write, keep_alive_of(request))


@router.post(
    "/models/update",
    **operation("Change a model that is served", ModelCard, takes=UpdateBody, problems=COMMANDING),
)
async def update_model(request: Request) -> Response:
    """Body: `model` and what is to become another: `slo`, `priority`, `limits`, `pin`, `pace`. What is left out stays;
    `limits` are told as a whole."""
    body = await read_body(request, UpdateBody, settings_of(request).body_bytes_max)
    name, slo, limits = body.model, body.slo or SloFields({}), body.limits
    change = ModelChange(
        ttft_ns=_deadline_ns(slo.ttft_ms),
        tbt_ns=_deadline_ns(slo.tbt_ms),
        gap_ns=_deadline_ns(slo.gap_ms),
        priority=body.priority,
        limits=_read_limits(limits) if limits is not None else None,
        pinned=body.pin,
        pace=cast("Pace | None", body.pace),
    )
    for part in (slo, body):
        part.end()
    find(market_of(request), name)
    return json_reply(card_of(await queries_of(request).change_model(name, change)))


def _deadline_ns(deadline_ms: float | None) -> int | None:
    return None if deadline_ms is None else round(deadline_ms * NS_PER_MS)


def _read_limits(fields: LimitsFields) -> Limits:
    limits = Limits(fields.requests_per_minute or None, fields.tokens_per_minute or None, fields.concurrent or None)
    fields.end()
    return limits


@router.post(
    "/models/evict",
    **operation(
        "Take a model's weights out of memory until its next request",
        ModelCard,
        takes=ModelBody,
        problems=COMMANDING,
    ),
)
async def evict_model(request: Request) -> Response:
    """Body: `model`. Its weights leave all memory; the next request for it brings them back."""
    name = await _named(request)
    return json_reply(card_of(await queries_of(request).unload_model(name)))


@router.post("/models/unload", **operation("Serve a model no more", Removed, takes=ModelBody, problems=COMMANDING))
async def unload_model(request: Request) -> Response:
    """One that is served, or being registered."""
    name = await _named(request, may_come=True)
    await queries_of(request).remove_model(name)
    return json_reply(Removed(name))


async def _named(request: Request, *, may_come: bool = False) -> str:
    """The model that the body names, and nothing else; with `may_come` one that is being registered, too. Raises
    UserError."""
    body = await read_body(request, ModelBody, settings_of(request).body_bytes_max)
    name = body.model
    body.end()
    if not (may_come and name in market_of(request).coming()):
        find(market_of(request), name)
    return name
