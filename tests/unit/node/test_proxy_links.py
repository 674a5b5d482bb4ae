"""A node's proxies are told the same: of a lost instance before anybody else, of each other's load."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aegis.core.ids import InstanceId, ModelId, ProxyId
from aegis.node import proxy_links
from aegis.node.proxy_links import ProxyLinks
from aegis.telemetry.metrics.scrape import Family
from aegis.telemetry.model_counts import Tally
from aegis.transport.node_messages import InstanceLost, Noted, ToProxy
from proxy.routing.events import ForeignLoad, ModelLoad

I = InstanceId("decode-0")  # noqa: E741
M = ModelId("m")
FIRST, SECOND, THIRD = (ProxyId(number) for number in range(3))
LOST = InstanceLost(I, 1)


class End:
    address = ""

    def __init__(self) -> None:
        self.told: list[ToProxy] = []
        self.responses: dict[str, bytes] = {}
        self.hangs = False

    def deliver(self, message: ToProxy) -> None:
        self.told.append(message)

    async def scrape(self) -> tuple[Family, ...]:
        return ()

    async def cancel_response(self, key: str) -> bytes | None:
        if self.hangs:
            await asyncio.Event().wait()
        return self.responses.get(key)

    def tallies(self) -> list[Tally]:
        return [Tally(M, waiting=1, arrived=4)]


def joined(*proxies: ProxyId) -> tuple[ProxyLinks, list[End]]:
    ends, made = ProxyLinks(), [End() for _ in proxies]
    for proxy, end in zip(proxies, made, strict=True):
        ends.join(proxy, end)
    return ends, made


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def begun(ends: ProxyLinks) -> asyncio.Task[None]:
    task = asyncio.create_task(ends.lost(LOST))
    await asyncio.sleep(0)
    return task


def test_a_response_is_cancelled_by_whoever_generates_it_while_another_one_hangs() -> None:
    async def main() -> None:
        ends, made = joined(FIRST, SECOND, THIRD)
        made[0].hangs, made[2].responses = True, {"a": b"ended"}
        assert await ends.cancel_response("a") == b"ended"
        made[0].hangs = False
        assert await ends.cancel_response("b") is None

    run(main())


def test_a_loss_is_over_when_all_have_noted_it() -> None:
    async def main() -> None:
        ends, made = joined(FIRST, SECOND)
        task = await begun(ends)
        assert [end.told for end in made] == [[LOST], [LOST]]
        ends.noted(FIRST, Noted(I, 1))
        ends.noted(SECOND, Noted(I, 0))  # an earlier one
        await asyncio.sleep(0)
        assert not task.done()
        ends.noted(SECOND, Noted(I, 1))
        await task

    run(main())


def test_a_proxy_that_is_lost_meanwhile_is_not_waited_for() -> None:
    async def main() -> None:
        ends, _ = joined(FIRST, SECOND)
        task = await begun(ends)
        ends.noted(FIRST, Noted(I, 1))
        ends.leave(SECOND)
        await task

    run(main())


def test_a_proxy_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy_links, "NOTED_WITHIN_S", 0.01)

    async def main() -> None:
        ends, _ = joined(FIRST, SECOND)
        ends.on_silent = ends.leave
        task = await begun(ends)
        ends.noted(FIRST, Noted(I, 1))
        await task
        assert list(ends.addresses()) == [FIRST]

    run(main())


def load(prefill_ns: int, requests: int, tokens: int) -> ForeignLoad:
    of_model = ModelLoad(M, requests, tokens, prefill_ns=prefill_ns, more_worth=float(requests))
    return ForeignLoad(I, prefill_ns, (of_model,))


def test_each_is_told_what_all_others_have_there() -> None:
    async def main() -> None:
        ends, (first, second, third) = joined(FIRST, SECOND, THIRD)
        ends.loads(FIRST, [load(10, 1, 100)])
        ends.share()
        assert [end.told for end in (first, second, third)] == [[], [load(10, 1, 100)], [load(10, 1, 100)]]
        ends.loads(SECOND, [load(5, 2, 50)])
        ends.share()
        assert [end.told[-1] for end in (first, second, third)] == [load(5, 2, 50), load(10, 1, 100), load(15, 3, 150)]
        ends.loads(SECOND, [load(5, 2, 50)])
        ends.share()
        assert [len(end.told) for end in (first, second, third)] == [1, 1, 2]
        ends.leave(FIRST)
        assert (second.told[-1], third.told[-1]) == (ForeignLoad(I, 0, ()), load(5, 2, 50))

    run(main())


LOADS = st.dictionaries(
    st.sampled_from([InstanceId("decode-0"), InstanceId("decode-1")]),
    st.dictionaries(
        st.sampled_from("abc"),
        st.tuples(st.integers(1, 99), st.integers(0, 10**6), st.integers(0, 10**12), st.integers(-8, 8)),
    ),
)


@given(st.lists(LOADS, min_size=1, max_size=5))
def test_what_each_is_told_is_the_sum_of_the_others_to_the_last_bit(
    said: list[dict[InstanceId, dict[str, Any]]],
) -> None:
    proxies = [ProxyId(number) for number in range(len(said))]
    ends, made = joined(*proxies)
    for proxy, loads in zip(proxies, said, strict=True):
        ends.loads(proxy, [_foreign(instance, models) for instance, models in loads.items()])
    ends.share()
    for at, end in enumerate(made):
        others = [loads for number, loads in enumerate(said) if number != at]
        told = {load.instance: load for load in end.told if isinstance(load, ForeignLoad)}
        for instance in {instance for loads in others for instance in loads}:
            summed = dict[str, tuple[float, ...]]()
            for loads in others:
                for model, of in loads.get(instance, {}).items():
                    terms = (*of[:3], 2.0 ** -of[3] - 1)
                    summed[model] = tuple(map(sum, zip(terms, summed.get(model, (0, 0, 0, 0.0)), strict=True)))
            wanted = tuple(
                ModelLoad(ModelId(m), int(r), int(t), int(p), w) for m, (r, t, p, w) in sorted(summed.items())
            )
            prefill_ns = sum(each.prefill_ns for each in wanted)
            assert told.get(instance, ForeignLoad(instance, 0, ())) == ForeignLoad(instance, prefill_ns, wanted)


def _foreign(instance: InstanceId, models: dict[str, Any]) -> ForeignLoad:
    loads = [ModelLoad(ModelId(m), of[0], of[1], of[2], 2.0 ** -of[3] - 1) for m, of in models.items()]
    return ForeignLoad(instance, sum(load.prefill_ns for load in loads), tuple(loads))


def test_what_a_lost_proxy_counted_stays_and_what_it_had_is_gone() -> None:
    ends, _ = joined(FIRST, SECOND)
    assert ends.tallies() == {M: Tally(M, waiting=2, arrived=8)}
    ends.leave(SECOND)
    assert ends.tallies() == {M: Tally(M, waiting=1, arrived=8)}
    ends.leave(FIRST)
    assert ends.tallies() == {M: Tally(M, arrived=8)}
