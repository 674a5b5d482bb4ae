from __future__ import annotations

import struct
from base64 import b64decode
from typing import Any

import pytest

from aegis.core.request import Failure, Sampling
from proxy.http.market import Delivery, Failed
from tests.unit.proxy.http.scripted import CONTEXT_TOKENS, get, pooling_market, pools, post

PATH = "/v1/embeddings"


def ask(**parameters: Any) -> dict[str, Any]:
    return {"model": "e", "input": "hat"} | parameters


def test_an_embedding_has_openai_s_form() -> None:
    behind = pooling_market()
    reply = post(behind, PATH, ask(user="somebody", priority=-3))
    assert (reply.status_code, reply.json()) == (
        200,
        {
            "object": "list",
            "model": "e",
            "data": [{"object": "embedding", "index": 0, "embedding": [4.0, 1.0, 1.0, 1.0]}],
            "usage": {"prompt_tokens": 4, "total_tokens": 4},
        },
    )
    ((_, prompt, sampling),) = behind.submitted
    assert prompt == (256, *b"hat") and sampling == Sampling(max_tokens=1, temperature=0.0, pools=True)
    assert behind.priorities == [-3] and [permit.answer_tokens for permit in behind.permits] == [0]
    assert [permit.prompt_tokens for permit in behind.permits] == [4]


@pytest.mark.parametrize(
    ("given", "lengths"),
    [(["a", "hat"], [2, 4]), ([1, 2, 3], [3]), ([[1], [2, 3]], [1, 2])],
)
def test_several_texts_and_token_ids_keep_their_order(given: object, lengths: list[int]) -> None:
    data = post(pooling_market(), PATH, ask(input=given)).json()["data"]
    assert [(each["index"], each["embedding"][0]) for each in data] == list(enumerate(map(float, lengths)))


def test_base64_is_little_endian_float32() -> None:
    (only,) = post(pooling_market(), PATH, ask(encoding_format="base64")).json()["data"]
    assert struct.unpack("<4f", b64decode(only["embedding"])) == (4.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(("normalises", "expected"), [(False, [4.0, 1.0]), (True, [4 / 17**0.5, 1 / 17**0.5])])
def test_fewer_dimensions_are_the_first_ones_and_of_length_1_where_the_whole_is(
    normalises: bool, expected: list[float]
) -> None:
    (only,) = post(pooling_market(normalises=normalises), PATH, ask(dimensions=2)).json()["data"]
    assert only["embedding"] == pytest.approx(expected)


def test_the_model_s_own_prompt_comes_before_each_text_but_not_before_tokens() -> None:
    behind = pooling_market(prompt="a ")
    post(behind, PATH, ask())
    post(behind, PATH, ask(input=[1]))
    assert [prompt for _, prompt, _ in behind.submitted] == [(256, *b"a hat"), (1,)]


def test_texts_are_lowered_where_the_checkpoint_says_so() -> None:
    behind = pooling_market(lowercases=True, prompt="A ")
    post(behind, PATH, ask(input="HaT"))
    assert [prompt for _, prompt, _ in behind.submitted] == [(256, *b"a hat")]


def test_another_prompt_can_be_named_and_an_unknown_one_is_told_which_there_are() -> None:
    behind = pooling_market(prompt="a ", prompts=(("passage", ""), ("query", "b ")))
    for name in ("query", "passage"):
        assert post(behind, PATH, ask(prompt_name=name)).status_code == 200
    assert [prompt for _, prompt, _ in behind.submitted] == [(256, *b"b hat"), (256, *b"hat")]
    error = post(behind, PATH, ask(prompt_name="x")).json()["error"]
    assert error["param"] == "prompt_name" and "'passage', 'query'" in error["message"]


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"truncate": True}, CONTEXT_TOKENS),
        ({"truncate_prompt_tokens": -1}, CONTEXT_TOKENS),
        ({"truncate_prompt_tokens": 5}, 5),
        ({"truncate_prompt_tokens": 1 << 40}, CONTEXT_TOKENS),
    ],
)
@pytest.mark.parametrize("text", ["x" * 2 * CONTEXT_TOKENS, [7] * 2 * CONTEXT_TOKENS])
def test_long_texts_are_cut_where_that_is_asked_for(given: dict[str, Any], tokens: int, text: Any) -> None:
    behind = pooling_market()
    assert post(behind, PATH, ask(input=text) | given).status_code == 200
    assert len(behind.submitted[0][1]) == tokens
    refused = post(behind, PATH, ask(input=text, truncate=False))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "'truncate': true" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [258]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 5}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"truncate": "START"}, "truncate"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt_name": "query"}, "prompt_name"),
        ({"inputs": "a"}, "inputs"),
        ({"model": "m"}, "model"),
        ({"model": "r"}, "model"),
    ],
)
def test_wrong_requests_are_refused_with_what_is_wrong(wrong: dict[str, Any], param: str) -> None:
    behind = pooling_market()
    reply = post(behind, PATH, ask(**wrong))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert not behind.submitted


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "e", "prompt": "a"}),
        ("/v1/chat/completions", {"model": "e", "messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"model": "r", "prompt": "a"}),
        (PATH, {"model": "m", "input": "a"}),
    ],
)
def test_a_model_that_does_something_else_says_what(path: str, body: dict[str, Any]) -> None:
    error = post(pooling_market(), path, body).json()["error"]
    where = {"e": "/v1/embeddings", "r": "/v1/rerank", "m": "/v1/chat/completions"}[body["model"]]
    assert error["code"] == "wrong_task" and where in error["message"] and "\n" not in error["message"]


def test_what_a_model_does_is_in_the_list_of_models() -> None:
    cards = get(pooling_market(), "/v1/models").json()["data"]
    assert {card["id"]: card["task"] for card in cards} == {"e": "embed", "m": "generate", "r": "rerank"}


def test_one_text_that_fails_ends_all_and_its_reason_is_told() -> None:
    def script(prompt: Any, sampling: Sampling) -> list[Delivery]:
        return [Failed("the model failed")] if len(prompt) == 3 else list(pools()(prompt, sampling))  # type: ignore[arg-type]

    behind = pooling_market(script)
    reply = post(behind, PATH, ask(input=["a", "hi", "hat"]))
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, Failure.GENERATION)
    assert [handle.cancelled or handle.ended for handle in behind.handles] == [True] * 3


def test_what_is_no_number_is_no_answer() -> None:
    reply = post(pooling_market(pools(value=float("nan"))), PATH, ask())
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
