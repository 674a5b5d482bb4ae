"""Unread parts of answers are bounded in bytes: for one answer, and for all of a proxy."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable, Coroutine
from typing import Any

from aegis.core.ids import RequestId
from aegis.core.request import FinishReason, Token
from proxy.http.market import Delivery, Delta, Failed, Finished, Reused
from proxy.live.sequence_handle import LiveSequenceHandle
from proxy.live.unread_answers import UnreadAnswers, bytes_of
from proxy.routing.events import ClientLeft


def delta(alternatives: int = 20) -> Delta:
    """Nothing of it is shared with another one, as what comes over a wire."""
    return Delta((Token(1000, -0.5, tuple((2000 + i, -1.5 - i) for i in range(alternatives))),))


PART = bytes_of(delta())


class Stand:
    """A proxy's sequence handles, and who left."""

    def __init__(self, answer_parts: int, all_parts: int) -> None:
        self.unread_answers = UnreadAnswers(answer_bytes_max=answer_parts * PART, all_bytes_max=all_parts * PART)
        self.left: list[int] = []
        self._numbers = 0

    def call_id(self, among: LiveSequenceHandle | None = None) -> LiveSequenceHandle:
        self._numbers += 1
        return LiveSequenceHandle(
            RequestId(self._numbers), self._leave, lambda request: None, self.unread_answers, among
        )

    def _leave(self, event: ClientLeft) -> None:
        self.left.append(event.request)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


async def put(call_id: LiveSequenceHandle, parts: int) -> None:
    for _ in range(parts):
        call_id.put(delta())
    await asyncio.sleep(0)


async def all_of(call_id: LiveSequenceHandle) -> list[Delivery]:
    return [delivery async for delivery in call_id]


def test_choices_of_an_answer_share_its_bound_and_are_given_up_together() -> None:
    async def main() -> None:
        stand = Stand(answer_parts=10, all_parts=1000)
        first = stand.call_id()
        second, other = stand.call_id(among=first), stand.call_id()
        await put(first, 5)
        await put(second, 5)
        await put(other, 10)
        assert stand.left == []
        await put(second, 1)
        assert sorted(stand.left) == [1, 2]
        for call_id in (first, second):
            (failed,) = await all_of(call_id)
            assert isinstance(failed, Failed) and failed.status == 499
            assert "MiB of it were not read" in failed.message
        other.put(Finished(FinishReason.STOP))
        assert len(await all_of(other)) == 11

    run(main)


def test_of_all_answers_that_with_the_most_to_read_is_given_up() -> None:
    async def main() -> None:
        stand = Stand(answer_parts=10, all_parts=20)
        few, many, none = stand.call_id(), stand.call_id(), stand.call_id()
        await put(few, 7)
        await put(many, 8)
        await put(none, 5)
        assert stand.left == []
        await put(none, 1)
        assert stand.left == [many.request]
        assert stand.unread_answers.nbytes < 14 * PART
        await put(none, 1)
        assert stand.left == [many.request]

    run(main)


def test_who_reads_what_comes_is_never_given_up() -> None:
    """However much comes at a time: it is looked at when the reader had its turn."""

    async def main() -> None:
        stand = Stand(answer_parts=10, all_parts=20)
        call_id = stand.call_id()
        reading = asyncio.create_task(all_of(call_id))
        await asyncio.sleep(0)
        for _ in range(3):
            await put(call_id, 50)
        call_id.put(Finished(FinishReason.LENGTH))
        assert len(await reading) == 151
        assert (stand.left, stand.unread_answers.nbytes) == ([], 0)

    run(main)


def test_nothing_waits_for_who_has_left() -> None:
    async def main() -> None:
        stand = Stand(answer_parts=10, all_parts=20)
        call_id = stand.call_id()
        await put(call_id, 9)
        call_id.cancel()
        assert stand.left == [call_id.request]
        assert stand.unread_answers.nbytes <= PART
        call_id.put(Failed("cancelled", 499))
        assert isinstance((await all_of(call_id))[-1], Failed)
        assert stand.unread_answers.nbytes == 0

    run(main)


def test_the_count_is_right_also_where_a_reader_is_stopped_on_its_way() -> None:
    async def main() -> None:
        for ends in (LiveSequenceHandle.cancel, lambda call_id: call_id.give_up("why")):
            stand = Stand(answer_parts=10, all_parts=20)
            call_id = stand.call_id()
            reading = asyncio.create_task(all_of(call_id))
            await asyncio.sleep(0)
            call_id.put(delta())
            call_id.put(delta())
            reading.cancel()
            await asyncio.wait([reading])
            ends(call_id)
            call_id.put(Failed("cancelled", 499))
            assert isinstance((await all_of(call_id))[-1], Failed)
            assert stand.unread_answers.nbytes == 0

    run(main)


def test_what_handles_that_are_gone_left_unread_does_not_count_against_others() -> None:
    async def main() -> None:
        stand = Stand(answer_parts=10, all_parts=20)
        for _ in range(50):
            gone = stand.call_id()
            await put(gone, 3)
            gone.cancel()
        del gone
        gc.collect()
        call_id = stand.call_id()
        await put(call_id, 9)
        assert call_id.request not in stand.left
        assert stand.unread_answers.nbytes == 9 * PART

    run(main)


def test_what_a_given_up_answer_still_gets_is_not_kept() -> None:
    async def main() -> None:
        stand = Stand(answer_parts=10, all_parts=20)
        call_id = stand.call_id()
        await put(call_id, 11)
        await put(call_id, 30)
        call_id.put(Failed("cancelled", 499))
        assert len(await all_of(call_id)) == 1
        assert stand.left == [call_id.request]

    run(main)


def test_deliveries_are_counted_as_what_they_take() -> None:
    for alternatives in (0, 1, 5, 20):
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        held = [delta(alternatives) for _ in range(1000)]
        took = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert 0.7 < sum(map(bytes_of, held)) / took < 1.6
    assert bytes_of(Reused(5)) and bytes_of(Delta(()))
