"""The JSON of a request."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.ids import ModelId
from bench.serve.plan import Planned
from bench.serve.prompts import Draws, Wording

A, B = ModelId("a"), ModelId("b")
DRAWS = Draws(0, 300)


def wording(**changes: Any) -> Wording:
    fields: dict[str, Any] = {
        "chat": False,
        "draws": DRAWS,
        "token_ids": {A: (5, 7, 9), B: (11,)},
        "returning": frozenset({B}),
        "ignore_eos": False,
        "extra": {},
    }
    return Wording(**fields | changes)


def body(how: Wording, planned: Planned, index: int = 0) -> dict[str, Any]:
    return msgspec.json.decode(how.body(planned, index), type=dict[str, Any])


@given(st.integers(1, 300), st.integers(0, 10_000))
def test_a_prompt_has_its_length_in_tokens_the_model_knows(tokens: int, index: int) -> None:
    planned = Planned(0, A, tokens, 4)
    prompt = body(wording(), planned, index)["prompt"]
    assert len(prompt) == tokens
    assert set(prompt) <= {5, 7, 9}
    assert prompt == body(wording(), planned, index)["prompt"]


def test_prompts_differ() -> None:
    how = wording(token_ids={A: range(1000)})
    prompts = {tuple(body(how, Planned(0, A, 16, 4), index)["prompt"]) for index in range(50)}
    assert len(prompts) > 45


def test_the_whole_of_a_completion_request() -> None:
    how = wording(ignore_eos=True, extra={"temperature": 0})
    assert body(how, Planned(0, B, 2, 4)) == {
        "model": "b",
        "prompt": [11, 11],
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "return_token_ids": True,
        "temperature": 0,
    }


def test_the_whole_of_a_chat_request() -> None:
    asked = body(wording(chat=True, token_ids=None), Planned(0, A, 3, 4))
    (message,) = asked.pop("messages")
    assert message["role"] == "user"
    assert len(message["content"].split()) == 3
    assert asked == {"model": "a", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}


def test_text_is_sent_as_it_is_and_made_where_wanted() -> None:
    assert body(wording(), Planned(0, A, 3, 4, "as it is"))["prompt"] == "as it is"
    assert len(body(wording(token_ids=None), Planned(0, A, 30, 4))["prompt"].split()) == 30
