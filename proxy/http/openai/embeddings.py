"""`POST /v1/embeddings`."""

from __future__ import annotations

from base64 import b64encode
from typing import Any, cast

import msgspec
import numpy as np
from fastapi import Request, Response
from msgspec import Struct

from aegis.core.errors import UserError
from proxy.http.direct_routes import direct_router
from proxy.http.errors import shown
from proxy.http.fields import Schema
from proxy.http.market import Served
from proxy.http.openai.held_requests import found
from proxy.http.openai.models import longest
from proxy.http.openai.pooled import (
    PooledBody,
    PooledText,
    PooledUsage,
    Vectors,
    checked,
    cut_to,
    fitted,
    too_long,
    usage_of,
    vectors_of,
)
from proxy.http.openapi import ASKING, operation
from proxy.http.parameters import Anything, Integer, OneOf, Text, required
from proxy.http.replies import encode
from proxy.http.request.body import read_body
from proxy.http.request.prompts import PROMPT_TOKENS_MAX, read_entries
from proxy.http.request.sampling import TOKEN_ID, checked_token_ids
from proxy.http.request.worker_thread import beside_loop
from proxy.http.settings import settings_of

INPUTS_MAX = 2048
VALUES_MAX = 1 << 22
"""Of all vectors of one answer: up to 90 MiB of JSON, 22 MiB of Base64."""

_FEW = 1 << 14
_TEXT: Schema = {"type": "string", "minLength": 1}
_TOKENS: Schema = {"type": "array", "items": TOKEN_ID, "minItems": 1, "maxItems": PROMPT_TOKENS_MAX}
_SEVERAL: Schema = {"type": "array", "items": {"anyOf": [_TEXT, _TOKENS]}, "minItems": 1, "maxItems": INPUTS_MAX}
_FORMATS = "float", "base64"

router = direct_router()


class EmbeddingBody(PooledBody):
    input = required(Anything({"anyOf": [_TEXT, _TOKENS, _SEVERAL]}))
    encoding_format = OneOf(_FORMATS)
    dimensions = Integer(None, low=1, about="Of each vector the first so many values")
    prompt_name = Text(None, about="The prompt of the checkpoint that comes before each text")


class Embedding(Struct, frozen=True):
    """`embedding` is a list of numbers, or the Base64 of them as little-endian float32."""

    index: int
    embedding: msgspec.Raw
    object: str = "embedding"


class EmbeddingList(Struct, frozen=True):
    data: list[Embedding]
    model: str
    usage: PooledUsage
    object: str = "list"


@router.post("/v1/embeddings", **operation("Texts as vectors", EmbeddingList, takes=EmbeddingBody, problems=ASKING))
async def create_embeddings(request: Request) -> Response:
    body = await read_body(request, EmbeddingBody, settings_of(request).body_bytes_max)
    served = await found(request, body, "embed")
    form, dimensions = body.encoding_format or "float", _dimensions(body, served)
    texts = await _texts(request, body, served)
    body.end()
    if len(texts) * dimensions > VALUES_MAX:
        message = (
            f"{len(texts)} vectors of {dimensions} values are more than one answer holds, which is {VALUES_MAX} values"
        )
        raise UserError(message, param="input", code="answer_too_large")
    vectors = await vectors_of(request, body, served, texts)

    def told() -> bytes:
        shown = _shortened(vectors, dimensions, served)
        data = [Embedding(at, _written(vector, form)) for at, vector in enumerate(shown)]
        return encode(EmbeddingList(data, served.spec.model, usage_of(texts)))

    return Response(await beside_loop(told, vectors.size, few=_FEW), media_type="application/json")


def _dimensions(body: EmbeddingBody, served: Served) -> int:
    pooling = served.spec.manifest.pooling
    assert pooling is not None
    return EmbeddingBody.dimensions.read_at_most(body, pooling.dimensions) or pooling.dimensions


async def _texts(request: Request, body: EmbeddingBody, served: Served) -> list[PooledText]:
    entries, cut = _entries(body, body.input), cut_to(body, served, truncates=False)
    prompt, pooling = _prompt(body, served), served.spec.manifest.pooling
    if isinstance(entries[0], str):
        texts = [prompt + text for text in cast("list[str]", entries)]
        if pooling and pooling.lowercases:
            texts = [text.lower() for text in texts]
        return await fitted(request, body, served, texts, param="input", cut=cut)
    return await beside_loop(lambda: [_of_tokens(body, served, each, cut) for each in entries], sum(map(len, entries)))


def _prompt(body: EmbeddingBody, served: Served) -> str:
    pooling, name = served.spec.manifest.pooling, body.prompt_name
    assert pooling is not None
    if name is None:
        return pooling.prompt
    prompts = dict(pooling.prompts)
    if name not in prompts:
        known = f"it has {', '.join(map(shown, prompts))}" if prompts else "it has none"
        raise body.invalid("prompt_name", f"is no prompt of {served.spec.model!r}: {known}")
    return prompts[name]


def _of_tokens(body: EmbeddingBody, served: Served, entry: str | list[Any], cut: int | None) -> PooledText:
    assert isinstance(entry, list)
    tokens = checked_token_ids(body, "input", entry, served.spec)[:cut]
    if len(tokens) > longest(served):
        raise too_long("input", len(tokens), served)
    return checked(body, "input", PooledText(tokens))


def _entries(body: EmbeddingBody, value: Any) -> list[str | list[Any]]:
    if value == "" or (isinstance(value, list) and "" in value):
        raise body.invalid("input", "is empty" if value in ("", [""]) else "has an empty string")
    return read_entries(body, "input", value, INPUTS_MAX, "texts")


def _shortened(vectors: Vectors, dimensions: int, served: Served) -> Vectors:
    """The first values of each; as long as 1 again where the whole vectors are."""
    pooling = served.spec.manifest.pooling
    if dimensions == vectors.shape[1] or pooling is None:
        return vectors
    short = vectors[:, :dimensions]
    if not pooling.normalises:
        return short
    normalised: Vectors = short / np.maximum(np.linalg.norm(short, axis=1, keepdims=True), 1e-12)
    return normalised


def _written(vector: Vectors, form: str) -> msgspec.Raw:
    if form == "base64":
        return msgspec.Raw(encode(b64encode(vector.astype("<f4").tobytes()).decode()))
    return msgspec.Raw(encode(vector.tolist()))
