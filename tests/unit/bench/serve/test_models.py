"""The served model that stands for a workload's model."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.errors import UserError
from aegis.core.ids import ModelId
from bench.serve.client import open_session
from bench.serve.models import SAFE_TOKEN_IDS, Card, assign, choose, known_token_ids, served_models
from tests.openai_stand import Stand

SERVED = [Card("b"), Card("a"), Card("c")]
NAMES = st.sets(st.sampled_from([ModelId(name) for name in ("a", "b", "m000", "m001", "m002", "m003")]), min_size=1)


@given(NAMES)
def test_in_turn_every_name_means_a_served_model_and_each_as_many_as_another(names: set[ModelId]) -> None:
    assigned = assign(names, SERVED, "round-robin")
    assert set(assigned) == names
    counts = [list(assigned.values()).count(card.model) for card in SERVED]
    assert max(counts) - min(counts) <= 1
    assert assigned[min(names)] == "b"


def test_names_that_are_served_mean_themselves() -> None:
    names = [ModelId("a"), ModelId("c")]
    assert assign(names, SERVED) == assign(names, SERVED, "name") == {"a": "a", "c": "c"}


def test_names_of_which_none_is_served_go_in_turn() -> None:
    names = [ModelId(f"m00{index}") for index in range(4)]
    assert list(assign(names, SERVED).values()) == ["b", "a", "c", "b"]


@pytest.mark.parametrize(("names", "how"), [(["a", "m000"], None), (["m000"], "name")])
def test_a_name_that_is_not_served_is_refused(names: list[str], how: str | None) -> None:
    with pytest.raises(UserError, match="'m000' is not served; --map round-robin"):
        assign([ModelId(name) for name in names], SERVED, how)


def test_models_are_chosen_by_name_in_the_order_given() -> None:
    assert choose(SERVED, []) == SERVED
    assert choose(SERVED, ["c", "b", "c"]) == [Card("c"), Card("b")]
    with pytest.raises(UserError, match="'z' is not served; those that are: a, b, c"):
        choose(SERVED, ["a", "z"])


def test_models_that_generate_no_text_are_left_out_and_not_taken_by_name() -> None:
    embedder = Card("e", task="embed")
    assert choose([*SERVED, embedder], []) == SERVED
    with pytest.raises(UserError, match="'e' generates no text; its task is embed"):
        choose([*SERVED, embedder], ["b", "e"])
    with pytest.raises(UserError, match="none of the models that are served generates text: e"):
        choose([embedder], [])


@pytest.mark.parametrize(("owner", "returns"), [("aegis", True), ("vllm", True), ("openai", False), ("", False)])
def test_only_servers_that_know_it_are_asked_for_token_ids(owner: str, returns: bool) -> None:
    assert Card("m", owner).returns_token_ids == returns


def test_a_server_without_tokenize_gets_tokens_that_every_vocabulary_has() -> None:
    async def main() -> None:
        async with Stand().running() as stand, open_session(None, silence_s=60) as session:
            assert [card.id for card in await served_models(session, stand.url)] == list(Stand.MODELS)
            known = await known_token_ids(session, stand.url, [ModelId("good"), ModelId("mute")])
            assert known == {"good": SAFE_TOKEN_IDS, "mute": SAFE_TOKEN_IDS}

    asyncio.run(main())


def test_where_no_server_is_this_is_said() -> None:
    async def main() -> None:
        async with Stand().running() as stand:
            url = stand.url
        async with open_session(None, silence_s=60) as session:
            with pytest.raises(UserError, match="no server at"):
                await served_models(session, url)
            with pytest.raises(UserError, match="no server at"):
                await served_models(session, "http://")

    asyncio.run(main())
