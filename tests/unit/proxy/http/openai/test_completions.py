from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from aegis.core.errors import UserError
from aegis.core.request import Failure, FinishReason, Sampling
from proxy.http.market import Delivery, Delta, Failed, Finished, Reused
from proxy.http.openai import answer as answer_module
from tests.unit.proxy.http.scripted import EOS, byte_text, market, post, says, spec, tokens, word_text

PATH = "/v1/completions"


def events(body: str) -> list[str]:
    """The data of each event; comments are left out."""
    blocks = body.split("\n\n")
    assert blocks[-1] == ""
    return [block.removeprefix("data: ") for block in blocks[:-1] if not block.startswith(":")]


def chunks(body: str) -> list[dict[str, Any]]:
    *data, done = events(body)
    assert done == "[DONE]"
    return [json.loads(part) for part in data]


def ask(**parameters: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "hi"} | parameters


def test_a_plain_completion_has_openai_s_form() -> None:
    behind = market(says("hello"))
    reply = post(behind, PATH, ask(request_id="abc"))
    assert reply.status_code == 200
    answer = reply.json()
    assert isinstance(answer.pop("created"), int)
    assert answer == {
        "id": "cmpl-abc",
        "object": "text_completion",
        "model": "m",
        "choices": [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    _, prompt, sampling = behind.submitted[0]
    assert prompt == (256, *b"hi")
    assert sampling.max_tokens == 16
    assert sampling.stop_token_ids == (EOS,)


def test_a_top_p_of_0_leaves_the_likeliest_token() -> None:
    behind = market()
    assert post(behind, PATH, ask(top_p=0)).status_code == 200
    assert 0 < behind.submitted[0][2].top_p <= 1e-6


def test_a_stream_has_one_chunk_per_delivery_and_says_the_same() -> None:
    reply = post(market(says("hello", per_delivery=2)), PATH, ask(stream=True))
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    said = chunks(reply.text)
    assert [chunk["choices"][0]["text"] for chunk in said] == ["he", "ll", "o", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in said] == [None, None, None, "stop"]
    assert all("usage" not in chunk for chunk in said)
    assert len({chunk["id"] for chunk in said}) == 1


def test_usage_comes_last_where_it_is_asked_for() -> None:
    said = chunks(post(market(), PATH, ask(stream=True, stream_options={"include_usage": True}, n=2)).text)
    assert all(chunk["usage"] is None for chunk in said[:-1])
    assert said[-1]["choices"] == []
    assert said[-1]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 10,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_and_choices_are_numbered_prompt_first(stream: bool) -> None:
    behind = market(lambda prompt, sampling: [Delta(tokens(bytes(prompt[-1:]))), Finished(FinishReason.LENGTH)])
    reply = post(behind, PATH, ask(prompt=["a", "b"], n=2, stream=stream))
    texts = {index: "" for index in range(4)}
    for part in chunks(reply.text) if stream else [reply.json()]:
        for choice in part["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "a", 1: "a", 2: "b", 3: "b"}


def test_every_form_of_prompt_is_understood() -> None:
    behind = market()
    for prompt in ("ab", ["ab", "c"], [97, 98], [[97, 98], [99]]):
        assert post(behind, PATH, ask(prompt=prompt, add_special_tokens=False)).status_code == 200
    assert [prompt for _, prompt, _ in behind.submitted] == [(97, 98), (97, 98), (99,), (97, 98), (97, 98), (99,)]


def test_a_seed_decides_all_choices_and_the_first_is_that_of_a_single_one() -> None:
    behind = market()
    for n in (1, 3, 3):
        post(behind, PATH, ask(seed=-7, n=n))
    seeds = [sampling.seed for _, _, sampling in behind.submitted]
    assert seeds[0] == seeds[1] == -7
    assert seeds[1:4] == seeds[4:7]
    assert len(set(seeds[1:4])) == 3


def test_without_a_seed_each_request_draws_its_own() -> None:
    behind = market()
    for _ in range(2):
        post(behind, PATH, ask())
    assert behind.submitted[0][2].seed != behind.submitted[1][2].seed


def test_parameters_reach_the_sampler() -> None:
    behind = market()
    given = {
        "max_tokens": 9,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": -1.5,
        "frequency_penalty": 2,
        "repetition_penalty": 1.1,
        "min_tokens": 3,
        "logprobs": 4,
    }
    post(behind, PATH, ask(**given, logit_bias={"5": -100, "3": 1.5}, stop_token_ids=[4, EOS], user="u"))
    sampling = behind.submitted[0][2]
    assert {name: getattr(sampling, name) for name in given} == given
    assert sampling.logit_bias == ((3, 1.5), (5, -100.0))
    assert sampling.stop_token_ids == (EOS, 4)
    assert sampling.prompt_logprobs is None
    post(behind, PATH, ask(ignore_eos=True, top_k=-1))
    assert behind.submitted[1][2].stop_token_ids == ()
    assert behind.submitted[1][2].top_k == 0


def test_priority_reaches_every_choice() -> None:
    behind = market()
    post(behind, PATH, ask(priority=-8, n=2))
    post(behind, PATH, ask(priority=8))
    post(behind, PATH, ask())
    assert behind.priorities == [-8, -8, 8, 0]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_name_tokens_and_where_they_begin(stream: bool) -> None:
    behind = market(says("né!"))
    reply = post(behind, PATH, ask(logprobs=2, stream=stream))
    parts = chunks(reply.text) if stream else [reply.json()]
    logprobs: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        for name, values in part["choices"][0]["logprobs"].items():
            logprobs[name] += values
    assert logprobs["tokens"] == ["n", "�", "é", "!"]
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["token_logprobs"] == [token.logprob for token in tokens("né!")]
    assert logprobs["top_logprobs"][0] == {"n": tokens("n")[0].logprob, "o": -2.0}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hé", [104, 0xC3, 0xA9]])
def test_echo_begins_with_the_prompt_and_its_logprobs(stream: bool, prompt: Any) -> None:
    behind = market(says("y!"))
    reply = post(behind, PATH, ask(prompt=prompt, add_special_tokens=False, echo=True, logprobs=0, stream=stream))
    parts = chunks(reply.text) if stream else [reply.json()]
    assert "".join(part["choices"][0]["text"] for part in parts) == "héy!"
    offsets = [offset for part in parts for offset in part["choices"][0]["logprobs"]["text_offset"]]
    scores = [score for part in parts for score in part["choices"][0]["logprobs"]["token_logprobs"]]
    tops = [top for part in parts for top in part["choices"][0]["logprobs"]["top_logprobs"]]
    assert offsets == [0, 1, 1, 2, 3]
    assert scores == [None, *(token.logprob for token in tokens("hé"[1:] + "y!"))]
    assert tops[0] is None
    assert behind.submitted[0][2].prompt_logprobs == 0


def test_echo_without_logprobs_asks_for_no_scores() -> None:
    behind = market(says("y"))
    assert post(behind, PATH, ask(echo=True)).json()["choices"][0]["text"] == "hiy"
    assert behind.submitted[0][2].prompt_logprobs is None


def test_a_stop_string_ends_the_text_and_the_sequence() -> None:
    behind = market(says("one two three", reason=FinishReason.LENGTH))
    answer = post(behind, PATH, ask(stop=["three", " two"], logprobs=0)).json()
    assert answer["choices"][0]["text"] == "one"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["o", "n", "e"]
    assert answer["usage"]["completion_tokens"] == len("one two")
    assert behind.handles[0].cancelled and behind.handles[0].satisfied


def test_stop_strings_wait_for_min_tokens() -> None:
    answer = post(market(says("aXbXc")), PATH, ask(stop="X", min_tokens=3)).json()
    assert answer["choices"][0]["text"] == "aXb"


def test_a_stop_token_has_no_text_unless_it_came_too_early_to_stop() -> None:
    answer = post(market(says("abc")), PATH, ask(stop_token_ids=[ord("c")], return_token_ids=True)).json()
    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["token_ids"] == [*b"abc"]
    answer = post(market(says("acbc")), PATH, ask(stop_token_ids=[ord("c")], min_tokens=2)).json()
    assert answer["choices"][0]["text"] == "acb"


def test_the_end_token_has_no_text() -> None:
    answer = post(market(says([*b"ab", EOS])), PATH, ask(logprobs=0)).json()
    assert answer["choices"][0]["text"] == "ab"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["a", "b", "</s>"]
    assert answer["usage"]["completion_tokens"] == 3


def test_the_first_word_keeps_the_space_that_separates_it_from_the_prompt() -> None:
    behind = market(says([2, 3, 4]), text=word_text())
    behind.served["m"].spec = spec("m", vocab_size=6)
    answer = post(behind, PATH, ask(prompt=[1], echo=True, logprobs=0)).json()
    assert answer["choices"][0]["text"] == "the cat sats"
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 3, 7, 11]


def test_what_would_be_too_large_an_answer_is_refused_before_it_is_made() -> None:
    behind = market(says("ab"))
    behind.served["m"].spec = spec("m", vocab_size=300, context_tokens=4096)
    asked = ask(prompt=[97] * 3000, echo=True, logprobs=4, n=18)
    assert refused(post(behind, PATH, asked), "answer_too_large") == "echo"
    assert not behind.submitted
    assert post(behind, PATH, asked | {"n": 1}).status_code == 200


def test_an_answer_that_became_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_module, "WHOLE_BYTES_MAX", 1 << 20)
    behind = market(says("a" * 40_000))
    behind.served["m"].spec = spec("m", vocab_size=300, context_tokens=1 << 16)
    assert refused(post(behind, PATH, ask(max_tokens=50_000, logprobs=1)), "answer_too_large") is None
    assert refused(post(behind, PATH, ask(max_tokens=50_000, logprobs=20)), "answer_too_large") is None
    assert post(behind, PATH, ask(max_tokens=50_000, logprobs=1, stream=True)).status_code == 200


def refused(reply: httpx.Response, code: str) -> str | None:
    """The parameter at fault."""
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, code), reply.text
    return error["param"]


def test_a_model_without_tokenizer_takes_and_gives_token_ids() -> None:
    behind = market(says([5, 6], per_delivery=1), text=None)
    answer = post(behind, PATH, ask(prompt=[1, 2])).json()
    assert answer["choices"][0] == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
        "token_ids": [5, 6],
    }
    for wrong in (ask(), ask(prompt=[1], stop="x")):
        reply = post(behind, PATH, wrong)
        assert reply.status_code == 400
        assert "no tokenizer" in reply.json()["error"]["message"] or "needs a tokenizer" in reply.text


def test_lengths_beyond_the_model_are_refused_with_both() -> None:
    behind = market()
    error = post(behind, PATH, ask(prompt=[1] * 500, max_tokens=13)).json()["error"]
    assert error["param"] == "max_tokens"
    assert error["code"] == "context_length_exceeded"
    assert all(number in error["message"] for number in ("500", "13", "513", "512"))
    assert post(behind, PATH, ask(prompt=[1] * 500, max_tokens=12)).status_code == 200
    assert post(behind, PATH, ask(prompt=[1] * 512)).json()["error"]["param"] == "prompt"
    behind.served["m"].kv_limit_tokens = 100
    error = post(behind, PATH, ask(prompt=[1] * 90, max_tokens=11)).json()["error"]
    assert "KV memory" in error["message"]
    assert "100" in error["message"]
    assert "90" in error["message"]


def test_a_text_that_no_context_holds_is_refused_before_it_is_tokenized() -> None:
    error = post(market(), PATH, ask(prompt="x" * 1_000_000)).json()["error"]
    assert error["param"] == "prompt" and error["code"] == "context_length_exceeded"
    assert error["message"].startswith("1000000 characters are more than") and "512 tokens" in error["message"]


def test_without_max_tokens_the_answer_gets_what_fits() -> None:
    behind = market()
    post(behind, PATH, ask(prompt=[1] * 507))
    assert behind.submitted[0][2].max_tokens == 5
    post(behind, PATH, ask(min_tokens=20))
    assert behind.submitted[1][2].max_tokens == 20


def test_all_sequences_are_submitted_or_none() -> None:
    behind = market()
    behind.refusals = [None, None, UserError("draining", status=503, kind="unavailable")]
    reply = post(behind, PATH, ask(n=4))
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"
    assert reply.json()["error"]["message"] == "draining"
    assert [handle.cancelled for handle in behind.handles] == [True, True]


def test_a_failure_answers_with_its_status_or_ends_the_stream_with_an_error() -> None:
    def script(prompt: object, sampling: object) -> list[Any]:
        return [Delta(tokens("a")), Failed("the instance cannot run it", 500)]

    reply = post(market(script), PATH, ask())
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "the instance cannot run it"
    reply = post(market(script), PATH, ask(stream=True))
    assert reply.status_code == 200
    said = [json.loads(part) for part in events(reply.text)]
    assert said[0]["choices"][0]["text"] == "a"
    assert said[1]["error"]["message"] == "the instance cannot run it"
    assert len(said) == 2


@pytest.mark.parametrize(
    ("kind", "status", "fault"),
    [
        (Failure.GENERATION, 500, "server_error"),
        (Failure.MODEL_REMOVED, 404, "invalid_request_error"),
        (Failure.MODEL_NOT_FETCHED, 503, "server_error"),
        (Failure.SHUTTING_DOWN, 503, "server_error"),
        (Failure.SLOW_GRAMMAR, 400, "invalid_request_error"),
        (Failure.SLOW_GRAMMARS, 503, "server_error"),
        (Failure.WOULD_BE_LATE, 429, "rate_limit_error"),
    ],
)
def test_a_failure_is_told_by_its_kind_whatever_it_says(kind: Failure, status: int, fault: str) -> None:
    reply = post(market(lambda prompt, sampling: [Failed("words", kind=kind)]), PATH, ask())
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"], error["message"]) == (status, kind, fault, "words")


def test_who_is_refused_after_a_while_is_told_when_to_come_again() -> None:
    late = Failed("words", kind=Failure.WOULD_BE_LATE, retry_after_s=3)
    reply = post(market(lambda prompt, sampling: [late]), PATH, ask())
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "3")


def test_one_failed_choice_fails_the_request_and_frees_the_others() -> None:
    def script(prompt: Any, sampling: Any) -> list[Any]:
        return [Failed("no", 500)] if prompt[-1] == ord("b") else [Delta(tokens("a"))] * 1000

    behind = market(script)
    assert post(behind, PATH, ask(prompt=["a", "b", "c"])).status_code == 500
    assert [handle.cancelled for handle in behind.handles] == [True, False, True]


def test_line_separators_do_not_split_an_event() -> None:
    text = "a\u2028b\u2029c\x85d\r\ne\0"
    body = post(market(says(text)), PATH, ask(stream=True)).text
    assert body.splitlines() == body.split("\n")[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks(body)) == text


def test_a_failed_model_is_refused_with_its_reason() -> None:
    reply = post(market(state="failed", detail="the header is truncated"), PATH, ask())
    assert reply.status_code == 503
    assert "the header is truncated" in reply.json()["error"]["message"]


def test_the_tokenizer_may_be_without_chat_template() -> None:
    assert post(market(text=byte_text(None)), PATH, ask()).status_code == 200


def test_choices_are_submitted_beside_the_first_one_of_their_prompt() -> None:
    behind = market()
    post(behind, PATH, ask(prompt=["a", "b"], n=3))
    first, second = behind.handles[0], behind.handles[3]
    assert behind.first_choices == [None, first, first, None, second, second]
    assert behind.among == [None, *behind.handles[:5]], "what waits to be read of them is bounded together"


def test_cached_tokens_are_what_the_first_choice_of_each_prompt_found() -> None:
    """The others went on from it."""
    reused = iter((4, 2, 0, 1))

    def script(prompt: Sequence[int], sampling: Sampling) -> list[Delivery]:
        return [Reused(next(reused)), Delta(tokens("x")), Finished(FinishReason.STOP)]

    reply = post(market(script), PATH, ask(prompt=["abcde", "fghij"], n=2)).json()
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert reply["usage"]["prompt_tokens"] == 12, "each begins with a special token"
