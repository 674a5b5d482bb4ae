"""Laws 1 to 6 of `SmoothPace`, and streams at that pace."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import accumulate, pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.errors import UserError
from aegis.core.model import Slo
from proxy.http.streaming.pace import HELD_MAX, SmoothPace, paced
from tests.unit.proxy.http.scripted import ScriptedMarket, market, post, says

TBT_NS = 100
SLOW_NS = 140
"""Apart, while more are to be in hand."""

SLO = Slo(ttft_ns=1000, tbt_ns=TBT_NS, gap_ns=500)


def left_at(made_ns: list[int], arrival_ns: int = 0) -> list[int]:
    """When each token leaves that was made then; one that says the end comes with the last of them."""
    pace, left = SmoothPace[int](SLO, arrival_ns), list[int]()
    numbers = [*enumerate(made_ns), (len(made_ns), made_ns[-1])]
    now_ns, order = 0, list[int]()
    while numbers or pace.waits:
        now_ns = min([numbers[0][1]] if numbers else [max(pace.next_ns, now_ns)], default=0)
        if pace.waits:
            now_ns = min(now_ns, max(pace.next_ns, left[-1] if left else 0))
        while numbers and numbers[0][1] <= now_ns:
            number, _ = numbers.pop(0)
            pace.made(number, tokens=int(number < len(made_ns)), now_ns=now_ns)
        for number in pace.leaving(now_ns):
            order.append(number)
            left.append(now_ns)
    assert order == list(range(len(made_ns) + 1)), "law 1"
    return left[:-1]


TIMES = st.lists(st.one_of(st.integers(0, 10), st.integers(0, 3000)), min_size=1, max_size=40).map(
    lambda gaps: list(accumulate(gaps))
)


@given(made_ns=TIMES)
def test_tokens_leave_in_order_on_time_and_never_further_apart_than_they_have_to(made_ns: list[int]) -> None:
    left_ns = left_at(made_ns)
    for at, (made, left) in enumerate(zip(made_ns, left_ns, strict=True)):
        assert left >= made
        assert left <= max(made, SLO.due_ns(0, at)), "law 2"
    for at, (before, after) in enumerate(pairwise(left_ns)):
        if made_ns[at + 1] <= before:
            assert after - before <= SLOW_NS, "law 3"
        if made_ns[at] > SLO.due_ns(0, at):
            assert before == made_ns[at], "law 4"


def test_what_was_made_ahead_covers_a_gap() -> None:
    made_ns = [50] * 10 + [50 + 9 * TBT_NS] * 3
    left_ns = left_at(made_ns)
    assert [after - before for before, after in pairwise(left_ns)] == [TBT_NS] * 5 + [SLOW_NS] * 7


def test_tokens_leave_faster_once_enough_are_in_hand_for_the_longest_gap_so_far() -> None:
    made_ns = [0, 800, *[810] * 20]
    gaps = [after - before for before, after in pairwise(left_at(made_ns))]
    assert gaps == [800] + [SLOW_NS] + [TBT_NS] * 12 + [SLOW_NS] * 6 + [120]
    assert sum(gaps) == SLO.due_ns(0, 21), "the last one leaves by its deadline"


def test_a_gap_that_was_not_covered_is_seen_once() -> None:
    made_ns = [*[0] * 4, *(at for at in range(900, 20_000, 900) for _ in range(9))]
    gaps = [after - before for before, after in pairwise(left_at(made_ns))]
    assert max(gaps[:4]) > SLOW_NS and max(gaps[4:]) <= SLOW_NS, "law 5"


def test_what_is_in_hand_leaves_by_its_deadline() -> None:
    assert [SLO.due_ns(0, at) for at in range(4)] == [1000, 1100, 1200, 1300]
    assert left_at([0, 1150, 1150, 1150]) == [0, 1150, 1200, 1300]


def test_a_stream_that_was_late_catches_up_at_once() -> None:
    assert left_at([2000, 2001, 2002, 2003]) == [2000, 2001, 2002, 2003]


def test_no_more_than_so_many_tokens_are_held_back() -> None:
    pace = SmoothPace[int](SLO, 0)
    for part in range(HELD_MAX + 10):
        pace.made(part, tokens=1, now_ns=0)
    assert pace.leaving(0) == list(range(10)), "law 6"


async def _made(parts: list[int], error: Exception | None = None) -> AsyncIterator[int]:
    for part in parts:
        await asyncio.sleep(0)
        yield part
    if error:
        raise error


def _paced(parts: list[int], error: Exception | None = None, *, tbt_ns: int) -> list[int]:
    left: list[int] = []

    async def run() -> None:
        slo = Slo(ttft_ns=10**9, tbt_ns=tbt_ns, gap_ns=10**9)
        loop = asyncio.get_running_loop()
        pace = SmoothPace[int](slo, 0)
        async with aclosing(
            paced(_made(parts, error), lambda part: part % 2, pace, lambda: int(loop.time() * 1e9))
        ) as them:
            async for part in them:
                left.append(part)

    try:
        asyncio.run(asyncio.wait_for(run(), 20))
    except UserError:
        assert error
    return left


def test_all_of_a_stream_leaves() -> None:
    parts = [1, 3, 5, 2, 7, 4]
    assert _paced(parts, tbt_ns=1_000_000) == parts
    assert _paced([], tbt_ns=1) == []


def test_a_stream_that_fails_says_so_at_once_behind_what_was_made() -> None:
    parts = [1, 3, 5, 7]
    assert _paced(parts, UserError("it failed"), tbt_ns=3_600 * 10**9) == parts


def test_who_leaves_early_ends_what_is_made() -> None:
    ended: list[bool] = []

    async def endless() -> AsyncIterator[int]:
        try:
            while True:
                await asyncio.sleep(0)
                yield 1
        finally:
            ended.append(True)

    async def run() -> None:
        async with aclosing(paced(endless(), lambda _: 1, SmoothPace[int](SLO, 0), lambda: 0)) as parts:
            async for _ in parts:
                break
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 20))
    assert ended == [True]


def test_nothing_more_is_read_while_nobody_takes_what_leaves() -> None:
    read = list[int]()

    async def endless() -> AsyncIterator[int]:
        while True:
            await asyncio.sleep(0)
            read.append(1)
            yield 1

    async def run() -> None:
        async with aclosing(paced(endless(), lambda _: 1, SmoothPace[int](SLO, 0), lambda: 0)) as parts:
            await anext(parts)
            for _ in range(100):
                await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 20))
    assert len(read) <= 2


@pytest.mark.parametrize("waits", [True, False])
def test_what_has_no_token_leaves_with_the_one_before(waits: bool) -> None:
    pace = SmoothPace[str](SLO, 0)
    pace.made("token", tokens=1, now_ns=0)
    pace.made("end", tokens=0, now_ns=0)
    if waits:
        pace.made("more", tokens=1, now_ns=0)
    assert pace.leaving(0) == ["token", "end"] and pace.waits is waits


def _streamed(behind: ScriptedMarket, **body: Any) -> list[Any]:
    reply = post(behind, "/v1/completions", {"model": "m", "prompt": "a", "stream": True, **body})
    *events, done = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]", reply.text
    return [json.loads(each)["choices"][0] for each in events]


def test_a_smooth_stream_is_the_same_text_token_by_token() -> None:
    quick = Slo(ttft_ns=10**9, tbt_ns=1_000_000, gap_ns=10**9)
    behind = market(says("hello world", per_delivery=8))
    behind.served["m"].spec = msgspec.structs.replace(behind.served["m"].spec, slo=quick)
    made, smooth = _streamed(behind), _streamed(behind, pace="smooth")
    assert [choice["text"] for choice in smooth if choice["text"]] == list("hello world")
    assert "".join(choice["text"] for choice in made) == "hello world" and len(made) < len(smooth)
    assert smooth[-1]["finish_reason"] == made[-1]["finish_reason"] == "stop"


def test_a_models_pace_is_that_of_requests_that_do_not_say() -> None:
    quick = Slo(ttft_ns=10**9, tbt_ns=1_000_000, gap_ns=10**9)
    behind = market(says("hello world", per_delivery=8))
    model = behind.served["m"]
    model.spec, model.pace = msgspec.structs.replace(model.spec, slo=quick), "smooth"
    smooth, made = _streamed(behind), _streamed(behind, pace="made")
    assert [choice["text"] for choice in smooth if choice["text"]] == list("hello world")
    assert len(made) < len(smooth)


def test_a_pace_that_there_is_not_is_refused() -> None:
    reply = post(market(), "/v1/completions", {"model": "m", "prompt": "a", "pace": "slow"})
    assert reply.status_code == 400 and "'pace' must be one of made, smooth" in reply.json()["error"]["message"]
