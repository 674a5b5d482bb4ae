from __future__ import annotations

from typing import Any

import pytest

from tests.unit.proxy.http.scripted import CONTEXT_TOKENS, pooling_market, post

DOCUMENTS = ["a", "longest", {"text": "long"}]


def rank(**parameters: Any) -> dict[str, Any]:
    return {"model": "r", "query": "q", "documents": DOCUMENTS} | parameters


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_the_best_documents_come_first(path: str) -> None:
    """The script scores by length."""
    answer = post(pooling_market(), path, rank(top_n=2, return_documents=True)).json()
    assert answer.pop("id").startswith("rerank-")
    tokens = [1 + len(text) for text in ("a", "longest", "long")]
    assert answer == {
        "model": "r",
        "results": [
            {"index": 1, "relevance_score": float(tokens[1]), "document": {"text": "longest"}},
            {"index": 2, "relevance_score": float(tokens[2]), "document": {"text": "long"}},
        ],
        "usage": {"prompt_tokens": sum(tokens), "total_tokens": sum(tokens)},
    }


def test_documents_are_not_sent_back_unless_they_are_asked_for_and_equals_keep_their_order() -> None:
    results = post(pooling_market(), "/v1/rerank", rank(documents=["b", "a", "c"])).json()["results"]
    assert results == [{"index": at, "relevance_score": 2.0} for at in range(3)]


def test_pairs_are_the_query_and_each_document_and_long_ones_are_cut() -> None:
    behind = pooling_market()
    assert post(behind, "/v1/rerank", rank(documents=["a", "x" * CONTEXT_TOKENS * 2])).status_code == 200
    assert [prompt[:2] for _, prompt, _ in behind.submitted] == [tuple(b"qa"), tuple(b"qx")]
    assert len(behind.submitted[1][1]) == CONTEXT_TOKENS
    reply = post(behind, "/v1/rerank", rank(documents=["x" * CONTEXT_TOKENS], truncate=False))
    assert reply.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("most", "tokens"), [(5, 5), (-1, CONTEXT_TOKENS), (1 << 40, CONTEXT_TOKENS)])
def test_pairs_are_cut_to_as_many_tokens_as_are_asked_for(most: int, tokens: int) -> None:
    long, cut = "x" * CONTEXT_TOKENS * 2, {"truncate_prompt_tokens": most, "truncate": False}
    score = {"model": "r", "text_1": "q", "text_2": long}
    for path, body in (("/v1/rerank", rank(documents=[long])), ("/v1/score", score)):
        behind = pooling_market()
        assert post(behind, path, body | cut).status_code == 200
        assert [len(prompt) for _, prompt, _ in behind.submitted] == [tokens]


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize(
    ("first", "second", "scores"),
    [("q", "a", [2.0]), ("q", ["a", "ab"], [2.0, 3.0]), (["q", "qq"], ["a", "abc"], [2.0, 5.0])],
)
def test_scores_are_in_the_order_of_the_pairs(path: str, first: Any, second: Any, scores: list[float]) -> None:
    answer = post(pooling_market(), path, {"model": "r", "text_1": first, "text_2": second}).json()
    assert [(each["index"], each["score"]) for each in answer["data"]] == list(enumerate(scores))
    assert answer["object"] == "list" and answer["usage"]["total_tokens"] == sum(scores)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", rank(query=""), "query"),
        ("/v1/rerank", rank(query=["q"]), "query"),
        ("/v1/rerank", rank(documents=[]), "documents"),
        ("/v1/rerank", rank(documents="a"), "documents"),
        ("/v1/rerank", rank(documents=["a", ""]), "documents[1]"),
        ("/v1/rerank", rank(documents=[{"title": "a"}]), "documents[0]"),
        ("/v1/rerank", rank(documents=["a"] * 1025), "documents"),
        ("/v1/rerank", rank(top_n=0), "top_n"),
        ("/v1/rerank", rank(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
        ("/v1/rerank", rank(model="e"), "model"),
        ("/v1/rerank", rank(model="m"), "model"),
        ("/v1/rerank", rank(query="q" * (1 << 15), documents=["a"] * 1024), "documents"),
        ("/v1/score", {"model": "r", "text_1": "q" * (1 << 15), "text_2": ["a"] * 1024}, "text_2"),
        ("/v1/score", {"model": "r", "text_1": "q", "text_2": []}, "text_2"),
        ("/v1/score", {"model": "r", "text_1": ["q", "p"], "text_2": ["a"]}, "text_1"),
        ("/v1/score", {"model": "r", "text_1": "q", "text_2": [1]}, "text_2"),
        ("/v1/score", {"model": "r", "text_1": "q"}, "text_2"),
    ],
)
def test_wrong_requests_are_refused_with_what_is_wrong(path: str, body: dict[str, Any], param: str) -> None:
    behind = pooling_market()
    reply = post(behind, path, body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert not behind.submitted
