"""Requests to a server that misbehaves in every way: each gets its reason, and none holds up another."""

import asyncio
from collections.abc import Sequence

import pytest
from msgspec.json import encode

from aegis.core.ids import ModelId
from bench.serve.client import Client, open_session, replay
from bench.serve.plan import Outcome, Planned
from tests.openai_stand import Stand

KEY = "sk-very-secret"
TOKENS = 4


def requests(*models: str, at_ns: int = 0) -> list[Planned]:
    return [Planned(at_ns, ModelId(model), 3, TOKENS) for model in models]


def body_of(planned: Planned, index: int) -> bytes:
    return encode({"model": planned.model, "prompt": [1, 2, 3], "max_tokens": planned.output_tokens})


def sent(
    plan: Sequence[Planned], stand: Stand | None = None, max_concurrency: int | None = None, silence_s: float = 60
) -> list[Outcome]:
    async def main() -> list[Outcome]:
        async with (stand or Stand()).running() as running, open_session(KEY, silence_s=silence_s) as session:
            client = Client(session, f"{running.url}/v1/completions", KEY)
            return await replay(client, plan, body_of, max_concurrency=max_concurrency)

    return asyncio.run(main())


@pytest.mark.parametrize(("model", "prompt_tokens"), [("good", 7), ("no-usage", 3), ("bundled", 7)])
def test_an_answer_has_a_time_for_each_token(model: str, prompt_tokens: int) -> None:
    (outcome,) = sent(requests(model))
    assert (outcome.failure, outcome.finish, outcome.input_tokens) == ("", "length", prompt_tokens)
    assert outcome.output_tokens == TOKENS
    times_ns = [outcome.sent_ns, *outcome.token_times_ns, outcome.stop_ns]
    assert times_ns == sorted(times_ns)
    assert outcome.late_ns >= 0


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("refused", "HTTP 500: out of memory"),
        ("rude", "HTTP 401: I know you: Bearer ***"),
        ("cut", "the connection broke in the answer"),
        ("unfinished", "the stream ended before the answer did"),
        ("garbage", "an event is not as the API has it"),
        ("html", "the answer is text/html, no event stream"),
    ],
)
def test_a_failure_has_its_reason_in_one_line(model: str, reason: str) -> None:
    (outcome,) = sent(requests(model))
    assert outcome.failure == reason


def test_silence_is_not_waited_out() -> None:
    (outcome,) = sent(requests("mute"), silence_s=0.05)
    assert outcome.failure == "no answer in time"
    assert outcome.output_tokens == 1


def test_no_server_is_a_reason_too() -> None:
    async def main() -> list[Outcome]:
        async with Stand().running() as stand:
            url = stand.url
        async with open_session(None, silence_s=60) as session:
            return await replay(Client(session, url), requests("good"), body_of)

    (outcome,) = asyncio.run(main())
    assert outcome.failure.startswith("cannot connect")


def test_an_open_loop_waits_for_nobody() -> None:
    """The first request is answered last: it waits for all that come after it."""
    plan = [*requests("patient"), *requests(*["good"] * 5, at_ns=1_000_000)]
    outcomes = sent(plan, Stand(answers_awaited=5))
    assert [outcome.failure for outcome in outcomes] == [""] * 6
    assert max(outcomes, key=lambda outcome: outcome.token_times_ns[0]).request == 0
    assert all(outcome.sent_ns >= outcome.planned.at_ns for outcome in outcomes)


@pytest.mark.parametrize("most", [1, 3])
def test_as_many_are_under_way_as_allowed_and_no_more(most: int) -> None:
    """All but one wait until the others have been answered, one by one."""
    stand = Stand(answers_awaited=5)
    outcomes = sent(requests(*["patient"] * (most - 1), *["good"] * 5), stand, max_concurrency=most)
    assert {outcome.failure for outcome in outcomes} == {""}
    assert stand.under_way_max == most


def test_outcomes_are_in_the_order_of_the_plan_and_told_as_they_come() -> None:
    told: list[Outcome] = []

    async def main() -> list[Outcome]:
        plan = [*requests("patient"), *requests("good", "refused")]
        async with Stand(answers_awaited=2).running() as stand, open_session(None, silence_s=60) as session:
            client = Client(session, f"{stand.url}/v1/completions")
            return await replay(client, plan, body_of, ended=told.append)

    outcomes = asyncio.run(main())
    assert [outcome.request for outcome in outcomes] == [0, 1, 2]
    assert told[-1].request == 0
    assert sorted(each.request for each in told) == [0, 1, 2]
