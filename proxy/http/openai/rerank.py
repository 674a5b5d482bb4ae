"""`POST /v1/rerank`, as Cohere and Jina have it, and `POST /v1/score`, as vLLM has it: scores of pairs of texts."""

from __future__ import annotations

from time import time
from typing import Any

from fastapi import Request, Response
from msgspec import UNSET, Struct, UnsetType

from proxy.http.direct_routes import direct_router
from proxy.http.fields import Fields, Schema
from proxy.http.market import Served
from proxy.http.openai.held_requests import found
from proxy.http.openai.pooled import (
    PooledBody,
    PooledText,
    PooledUsage,
    cut_to,
    fitted,
    usage_of,
    vectors_of,
)
from proxy.http.openapi import ASKING, operation
from proxy.http.parameters import Anything, Flag, Integer, Items, Text, required
from proxy.http.replies import json_reply
from proxy.http.request.body import read_body
from proxy.http.request_ids import request_id_for
from proxy.http.settings import settings_of

DOCUMENTS_MAX = 1024
CHARACTERS_MAX = 1 << 22

_TEXT: Schema = {"type": "string", "minLength": 1}
_DOCUMENT: Schema = {
    "anyOf": [_TEXT, {"type": "object", "properties": {"text": _TEXT}, "required": ["text"]}],
}
_TEXTS: Schema = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": DOCUMENTS_MAX}]}

router = direct_router()


class RerankBody(PooledBody):
    query = required(Text(None, most_characters=CHARACTERS_MAX))
    documents = required(Items(_DOCUMENT, most=DOCUMENTS_MAX, least=1))
    top_n = Integer(None, low=1, about="So many of the documents, the best; else all")
    return_documents = Flag(False)


class ScoreBody(PooledBody):
    text_1 = required(Anything(_TEXTS))
    text_2 = required(Anything(_TEXTS))


class RankedDocument(Struct, frozen=True):
    text: str


class Ranked(Struct, frozen=True):
    """`index` is its place among the documents of the request."""

    index: int
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class Ranking(Struct, frozen=True):
    """The best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PooledUsage


class Score(Struct, frozen=True):
    index: int
    score: float
    object: str = "score"


class ScoreList(Struct, frozen=True):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: PooledUsage
    object: str = "list"


_RANKING = operation("Documents by what they say on a query", Ranking, takes=RerankBody, problems=ASKING)
_SCORES = operation("The scores of pairs of texts", ScoreList, takes=ScoreBody, problems=ASKING)


@router.post("/v1/rerank", **_RANKING)
async def rerank(request: Request) -> Response:
    body = await read_body(request, RerankBody, settings_of(request).body_bytes_max)
    served = await found(request, body, "rerank")
    query, documents = body.query, [_document(body, at, each) for at, each in enumerate(body.documents)]
    if not documents:
        raise body.invalid("documents", "is empty")
    top, told = body.top_n or len(documents), body.return_documents
    scores, texts = await _scores(request, body, served, [(query, document) for document in documents], "documents")
    best = sorted(range(len(documents)), key=lambda at: (-scores[at], at))[:top]
    results = [Ranked(at, scores[at], RankedDocument(documents[at]) if told else UNSET) for at in best]
    return json_reply(Ranking(f"rerank-{request_id_for(request, None)}", served.spec.model, results, usage_of(texts)))


@router.post("/v1/score", **_SCORES)
async def score(request: Request) -> Response:
    body = await read_body(request, ScoreBody, settings_of(request).body_bytes_max)
    served = await found(request, body, "rerank")
    scores, texts = await _scores(request, body, served, _pairs(body), "text_2")
    data = [Score(at, each) for at, each in enumerate(scores)]
    name = f"score-{request_id_for(request, None)}"
    return json_reply(ScoreList(name, int(time()), served.spec.model, data, usage_of(texts)))


for _path in ("/rerank", "/v2/rerank"):  # as Jina's and Cohere's clients name it
    router.add_api_route(_path, rerank, methods=["POST"], include_in_schema=False)
router.add_api_route("/score", score, methods=["POST"], include_in_schema=False)


async def _scores(
    request: Request, body: PooledBody, served: Served, pairs: list[tuple[str, str]], param: str
) -> tuple[list[float], list[PooledText]]:
    """Long texts are cut, as all that serve rerankers do, unless they are to be refused."""
    cut = cut_to(body, served, truncates=True)
    body.end()
    texts = await fitted(request, body, served, pairs, param=param, cut=cut)
    return (await vectors_of(request, body, served, texts))[:, 0].tolist(), texts


def _document(body: Fields, at: int, value: Any) -> str:
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        raise body.invalid(f"documents[{at}]", "must be a string that is not empty, or an object with such a 'text'")
    return text


def _pairs(body: ScoreBody) -> list[tuple[str, str]]:
    """One text with each of several, or several with as many."""
    first, second = _texts(body, "text_1", body.text_1), _texts(body, "text_2", body.text_2)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise body.invalid("text_1", f"has {len(first)} texts for {len(second)} of 'text_2': send one, or as many")
    return list(zip(first, second, strict=True))


def _texts(body: ScoreBody, name: str, value: Any) -> list[str]:
    texts = value if isinstance(value, list) else [value]
    if not texts or len(texts) > DOCUMENTS_MAX or not all(isinstance(each, str) and each for each in texts):
        raise body.invalid(name, f"must be a string or a list of 1 to {DOCUMENTS_MAX} strings, none of them empty")
    return texts
