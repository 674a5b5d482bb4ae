"""The list of models, `/v1/models`, and the search for the one that a request names."""

from __future__ import annotations

from pathlib import PurePath
from typing import Literal, TypeVar

from fastapi import APIRouter, Request, Response
from msgspec import Struct, structs

from aegis.core.clock import NS_PER_MS
from aegis.core.errors import UserError
from aegis.core.limits import Limits
from aegis.core.model import Pace, Slo
from proxy.http.errors import nearest, shown
from proxy.http.market import Market, Served
from proxy.http.openapi import operation
from proxy.http.replies import json_reply
from proxy.http.request.body import ModelBody
from proxy.http.security.key_guard import caller_of
from proxy.http.settings import market_of

router = APIRouter()


class SloCard(Struct, frozen=True):
    ttft_ms: float
    tbt_ms: float
    gap_ms: float


class ModelCard(Struct, frozen=True):
    """OpenAI's fields, then vLLM's, then `state`, where its weights are, what may be changed of it, what it does
    (`generate`, `embed`, `rerank`) and, as `detail`, why it failed, or how a GGUF file runs. The
    `parent` of an adapter is its base."""

    id: str
    created: int
    root: str
    max_model_len: int
    state: str
    weights: str
    pinned: bool
    priority: int
    slo: SloCard
    limits: Limits
    task: str
    pace: Pace | None = None  # of its streams, where it is not the server's
    detail: str | None = None
    object: str = "model"
    owned_by: str = "aegis"
    parent: str | None = None


class ComingCard(Struct, frozen=True):
    """A model that is being registered, or will be at its first request (`lazy`); `detail` says how far that is."""

    id: str
    root: str
    detail: str
    state: str = "registering"
    object: str = "model"
    owned_by: str = "aegis"
    created: int = 0


Card = TypeVar("Card", ModelCard, ComingCard)


class ModelList(Struct, frozen=True):
    data: list[ModelCard]
    coming: list[ComingCard]
    object: str = "list"


def longest(served: Served) -> int:
    """The most tokens that one sequence of the model may have."""
    return min(served.spec.manifest.context_tokens, served.kv_limit_tokens)


def note_of(served: Served) -> str:
    """What a user should know of the model beforehand, in half a sentence; empty if that is nothing."""
    quantised = served.spec.manifest.quantised
    missing = "" if served.text else "no tokenizer: takes token ids only"
    return "; ".join(filter(None, (served.spec.note, quantised.told if quantised else "", missing)))


def card_of(served: Served) -> ModelCard:
    return ModelCard(
        id=served.spec.model,
        created=served.created_s,
        root=served.spec.root,
        max_model_len=longest(served),
        state=served.state,
        weights=served.weights,
        pinned=served.pinned,
        priority=served.priority,
        slo=_slo_card(served.spec.slo),
        limits=served.limits,
        task=task_of(served),
        pace=served.pace,
        detail=served.detail or note_of(served) or None,
        parent=served.spec.base,
    )


def _slo_card(slo: Slo) -> SloCard:
    return SloCard(slo.ttft_ns / NS_PER_MS, slo.tbt_ns / NS_PER_MS, slo.gap_ns / NS_PER_MS)


def coming_cards(market: Market) -> list[ComingCard]:
    coming = sorted(market.coming().items())
    return [
        ComingCard(name, each.root, each.progress, "lazy" if each.lazy else "registering")
        for name, each in coming
        if name not in market.models()
    ]


def find(market: Market, name: str) -> Served:
    """Raises UserError: 404 naming near matches, or how far one is that is coming."""
    models = market.models()
    served = models.get(name)
    if served is not None:
        return served
    if coming := market.coming().get(name):
        message = f"model {shown(name)} is not served yet: {coming.progress}"
    else:
        near = nearest(name, models)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "GET /v1/models lists those there are"
        message = f"there is no model {shown(name)}; {hint}"
    raise UserError(message, status=404, param="model", code="model_not_found")


Task = Literal["generate", "embed", "rerank"]
_INSTEAD: dict[Task, str] = {
    "generate": "generates text: ask it at /v1/chat/completions or /v1/completions",
    "embed": "makes embeddings: send it 'input' at /v1/embeddings",
    "rerank": "ranks texts: send it 'query' and 'documents' at /v1/rerank",
}


def task_of(served: Served) -> Task:
    pooling = served.spec.manifest.pooling
    return pooling.task if pooling else "generate"


def find_servable(market: Market, body: ModelBody, task: Task | None = "generate") -> Served:
    """The model that `model` names. Raises UserError: 404 where there is none, 503 where it could not be loaded, 400
    where it does something else than `task`."""
    served = find(market, body.model)
    if task is not None and task_of(served) != task:
        message = f"model {served.spec.model!r} {_INSTEAD[task_of(served)]}"
        raise UserError(message, param="model", code="wrong_task")
    if served.state == "failed":
        reason = served.detail or "its checkpoint cannot be served"
        raise UserError(f"{served.spec.model!r} failed: {reason}", status=503, param="model", code="model_failed")
    return served


_NAME = {"name": "name", "in": "path", "required": True, "schema": ModelBody.model.schema()}


@router.get("/v1/models", **operation("The models that are served", ModelList))
async def list_models(request: Request) -> Response:
    cards = [_shown(card_of(served), request) for _, served in sorted(market_of(request).models().items())]
    return json_reply(ModelList(cards, [_shown(card, request) for card in coming_cards(market_of(request))]))


@router.get(
    "/v1/models/{name:path}",
    **operation("One of them", ModelCard, ComingCard, problems=(401, 404), parameters=(_NAME,)),
)
async def retrieve_model(request: Request) -> Response:
    """Also one that is coming: requests for it are held, and clients ask for it before they send one."""
    market, name = market_of(request), request.path_params["name"]
    coming = next((card for card in coming_cards(market) if card.id == name), None)
    return json_reply(_shown(coming, request) if coming else _shown(card_of(find(market, name)), request))


def _shown(card: Card, request: Request) -> Card:
    """Callers with a key of their own are not told where checkpoints lie on the server's machine; the admin is."""
    caller = caller_of(request)
    return structs.replace(card, root=PurePath(card.root).name) if caller.name and not caller.is_admin else card
