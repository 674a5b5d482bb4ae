"""Families of the OpenAI API that aegis does not serve: 501 with one line, rather than a puzzling 404."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from aegis.core.errors import UserError
from proxy.http.errors import shown

_FAMILIES = (
    "/classify",
    "/pooling",
    "/v1/assistants",
    "/v1/audio",
    "/v1/batches",
    "/v1/containers",
    "/v1/conversations",
    "/v1/evals",
    "/v1/files",
    "/v1/fine_tuning",
    "/v1/images",
    "/v1/messages/batches",
    "/v1/moderations",
    "/v1/realtime",
    "/v1/responses/compact",
    "/v1/responses/input_tokens",
    "/v1/threads",
    "/v1/uploads",
    "/v1/vector_stores",
    "/v1/videos",
)
_SERVED = (
    "there are /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/embeddings, /v1/rerank and "
    "/v1/score"
)
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]

router = APIRouter()


async def _refuse(request: Request) -> Response:
    message = f"{shown(request.scope['path'])} is not served: {_SERVED}"
    raise UserError(message, status=501, code="not_implemented")


for _family in _FAMILIES:
    router.add_api_route(_family, _refuse, methods=_METHODS, include_in_schema=False)
    router.add_api_route(_family + "/{rest:path}", _refuse, methods=_METHODS, include_in_schema=False)
