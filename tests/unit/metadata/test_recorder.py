"""A call has one owner at a time, and whoever retries it gets what was begun."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from aegis.core.errors import UserError
from aegis.core.request import FinishReason
from aegis.core.rng import Stream
from aegis.metadata.keys import SCHEMA
from aegis.metadata.recorder import commands_for
from aegis.metadata.recording import Recording
from aegis.metadata.store import Store
from proxy.http.market import Delta, Finished, PromptScores
from tests.redis_server import RedisServer
from tests.unit.metadata.proxies import KEYS, asked, die, proxy, read, tokens, until, written

CALLERS = 12
CALLS = 100  # many commands' worth
ROUNDS = 20


async def refusal(store: Store, *args: Any, **asking: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        await store.records.open(asked(*args, **asking))
    return caught.value


def test_a_finished_call_is_answered_from_its_record_at_any_proxy(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as first, proxy(redis) as second:
            call = await first.records.open(asked())
            said = [PromptScores(tokens(9)), Delta(tokens(1, 2)), Delta(tokens(3)), Finished(FinishReason.STOP)]
            told = await read(call, *said)
            call.close()
            await written(first)
            for store in (first, second):
                retried = await store.records.open(asked(seed=8))
                again = await read(retried)
                retried.close()
                assert again.sent is None
                assert retried.seed == 7
                assert (again.tokens, again.finish, again.scores) == (told.tokens, told.finish, told.scores)
                assert store.records.counters.replayed == 1

    asyncio.run(main())


def test_a_call_with_a_new_id_waits_for_no_server_and_is_recorded(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as first, proxy(redis) as second:
            redis.pause()
            told = {}
            for name, end in (("finished", [Finished(FinishReason.LENGTH)]), ("left", [])):
                call = await first.records.open(asked(name, is_new=True))
                told[name] = await read(call, Delta(tokens(1, 2)), *end)
                call.close()
            redis.resume()
            await written(first)
            assert first.records.counters.restored == 0
            again = await second.records.open(asked("finished", seed=8))
            assert (again.seed, second.records.counters.replayed) == (7, 1)
            assert (await read(again)).tokens == told["finished"].tokens
            again = await second.records.open(asked("left", seed=8))
            assert again.seed == 7
            assert (await read(again, Finished(FinishReason.STOP))).sent == (1, 2)
            assert (await refusal(second, "finished", fingerprint="g")).code == "request_id_reused"

    asyncio.run(main())


def test_a_call_with_a_new_id_is_recorded_before_there_is_a_token(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as first, proxy(redis) as second:
            call = await first.records.open(asked(is_new=True))
            await written(first)
            assert (await refusal(second)).code == "request_in_flight"
            call.close()

    asyncio.run(main())


def test_a_record_whose_writing_was_not_answered_is_written_again(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as first, proxy(redis) as second:
            call = await first.records.open(asked(is_new=True))
            await read(call, Delta(tokens(1, 2)))
            await written(first)
            call.forget_written()
            told = await read(call, Delta(tokens(3)), Finished(FinishReason.STOP))
            call.close()
            await written(first)
            again = await read(await second.records.open(asked()))
            assert [token.id for token in again.tokens] == [1, 2, 3], told

    asyncio.run(main())


def test_a_retry_elsewhere_that_comes_before_the_record_has_the_call(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as first, proxy(redis) as second:
            for task in first._tasks:
                task.cancel()  # its rounds, too: the claim comes before what it writes
            call = await first.records.open(asked(is_new=True))
            await read(call, Delta(tokens(1, 2)))
            retried = await second.records.open(asked())
            await first.records._flush(1)
            assert call.settled.is_set() and first.records.counters.restored == 0
            told = await read(retried, Delta(tokens(1, 2, 3)), Finished(FinishReason.STOP))
            retried.close()
            await written(second)
            assert (await read(await first.records.open(asked()))).tokens == told.tokens

    asyncio.run(main())


def test_no_call_begins_while_the_server_is_known_to_be_away(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis, wait_s=0.3) as store:
            redis.kill()
            await until(lambda: not store.membership.up.is_set())
            assert (await refusal(store, is_new=True)).code == "store_unavailable"

    asyncio.run(main())


def test_the_last_tokens_of_a_call_need_not_be_written_when_it_is_retried(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as store:
            call = await store.records.open(asked())
            told = await read(call, Delta(tokens(1, 2)), Finished(FinishReason.LENGTH))
            call.close()
            assert (await read(await store.records.open(asked()))).tokens == told.tokens

    asyncio.run(main())


def test_a_round_has_as_many_commands_as_it_takes_up_to_a_bound() -> None:
    commands = {0: (1, 8), 1: (1, 8), 8: (1, 8), 9: (2, 8), 64: (8, 8), 65: (8, 9), 256: (8, 32), 100_000: (8, 32)}
    assert {waiting: commands_for(waiting) for waiting in commands} == commands


def test_all_of_many_calls_are_written(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as store:
            for number in range(CALLS):
                call = await store.records.open(asked(f"r{number}"))
                await read(call, Delta(tokens(number)), Finished(FinishReason.LENGTH))
                call.close()
            await written(store)
            assert store.records.counters.written_batches >= CALLS

    asyncio.run(main())


def test_a_call_that_is_being_answered_is_not_answered_twice(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as first, proxy(redis) as second:
            call = await first.records.open(asked())
            for store in (first, second):
                error = await refusal(store)
                assert (error.status, error.code) == (409, "request_in_flight")
                assert "'r' is being answered" in error.message
            call.close()

    asyncio.run(main())


def test_another_request_under_the_same_id_is_refused(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as store:
            (await store.records.open(asked())).close()
            error = await refusal(store, fingerprint="g")
            assert (error.status, error.code) == (422, "request_id_reused")

    asyncio.run(main())


def test_what_a_dead_proxy_left_goes_on_after_the_tokens_recorded(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as first, proxy(redis) as second:
            await read(await first.records.open(asked()), PromptScores(tokens(9)), Delta(tokens(1, 2, 3)))
            await written(first)
            await die(redis, first)
            call = await second.records.open(asked(seed=8))
            rest = await read(call, Delta(tokens(4)), Finished(FinishReason.STOP))
            call.close()
            assert call.seed == 7
            assert rest.sent == (1, 2, 3)
            assert rest.sampling and rest.sampling.prompt_logprobs is None
            assert rest.tokens == [*tokens(1, 2, 3, 4)]
            assert rest.scores == tokens(9)
            await written(second)
            assert (await read(await second.records.open(asked()))).tokens == rest.tokens

    asyncio.run(main())


def test_a_call_whose_client_left_goes_on_where_it_was(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as first, proxy(redis) as second:
            call = await first.records.open(asked(sequences=2))
            await read(call, Delta(tokens(1)), Finished(FinishReason.STOP), sequence=0)
            await read(call, Delta(tokens(2)), sequence=1)
            call.close()
            await written(first)
            call = await second.records.open(asked(sequences=2))
            assert (await read(call, sequence=0)).sent is None
            assert (await read(call, Finished(FinishReason.STOP), sequence=1)).sent == (2,)
            call.close()

    asyncio.run(main())


def test_a_sequence_whose_last_token_is_recorded_is_finished(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as store:
            call = await store.records.open(asked())
            await read(call, Delta(tokens(*range(100))))
            call.close()
            call = await store.records.open(asked())
            answer = await read(call)
            assert (answer.sent, answer.finish) == (None, FinishReason.LENGTH)
            call.close()
            await written(store)
            await read(await store.records.open(asked()))
            assert store.records.counters.replayed == 1

    asyncio.run(main())


def test_what_a_stop_string_ended_is_finished(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as store:
            call = await store.records.open(asked())
            answer = await read(call, Delta(tokens(1)))
            assert answer.handle
            answer.handle.cancel(satisfied=True)
            call.close()
            answer = await read(await store.records.open(asked()))
            assert (answer.tokens, answer.finish) == ([*tokens(1)], FinishReason.STOP)

    asyncio.run(main())


def test_of_racing_claimers_one_gets_the_call(redis: RedisServer) -> None:
    """Many proxies, some of them dead before, claim the same calls at the same time, again and again."""

    async def claim(store: Store, request: str, delay: int) -> Recording | None:
        for _ in range(delay):
            await asyncio.sleep(0)
        try:
            return await store.records.open(asked(request))
        except UserError as error:
            assert error.status == 409
            return None

    async def main() -> None:
        draws = Stream(0, "claimers")
        async with proxy(redis) as a, proxy(redis) as b, proxy(redis) as c:
            stores = [a, b, c]
            for number in range(ROUNDS):
                callers = [stores[draws.below(3)] for _ in range(CALLERS)]
                claims = [claim(store, f"r{number % 3}", draws.below(9)) for store in callers]
                got = [call for call in await asyncio.gather(*claims) if call]
                assert len(got) == 1
                known = (await read(got[0], Delta(tokens(number)))).tokens
                assert known == [*tokens(*range(number % 3, number + 1, 3))]
                got[0].close()
                for store in stores:
                    await written(store)

    asyncio.run(main())


def test_who_lost_a_call_does_not_write_to_it(redis: RedisServer) -> None:
    """It was taken for dead, and is not."""

    async def main() -> None:
        async with proxy(redis) as first, proxy(redis) as second, Redis.from_url(redis.url) as client:
            slow = await first.records.open(asked())
            await read(slow, Delta(tokens(1)))
            await written(first)
            await client.delete(*[key async for key in client.scan_iter(KEYS.proxies + "*")])
            await read(await second.records.open(asked()), Delta(tokens(2)))
            await written(second)
            slow.note(0, Delta(tokens(5)))
            await until(slow.settled.is_set)
            assert await client.llen(KEYS.tokens("/r")) == 2

    asyncio.run(main())


def test_a_server_that_lost_everything_is_told_again(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as store, Redis.from_url(redis.url) as client:
            call = await store.records.open(asked())
            await read(call, Delta(tokens(1, 2)))
            await written(store)
            redis.kill()
            redis.start()
            call.note(0, Delta(tokens(3)))
            call.note(0, Finished(FinishReason.STOP))
            call.close()
            await written(store)
            while await client.get(KEYS.schema) != str(SCHEMA).encode():
                await asyncio.sleep(0.002)
            assert store.records.counters.restored == 1
            answer = await read(await store.records.open(asked()))
            assert answer.tokens == [*tokens(1, 2, 3)]

    asyncio.run(main())


@pytest.mark.parametrize("trouble", ["killed", "paused"])
def test_while_the_server_is_away_calls_go_on_and_new_ones_are_refused(redis: RedisServer, trouble: str) -> None:
    async def main() -> None:
        async with proxy(redis, wait_s=0.3) as store:
            call = await store.records.open(asked())
            redis.kill() if trouble == "killed" else redis.pause()
            await read(call, Delta(tokens(1)))
            error = await refusal(store, "new")
            assert (error.status, error.code) == (503, "store_unavailable")
            await read(call, Delta(tokens(2)), Finished(FinishReason.STOP))
            call.close()
            assert store.records.unwritten
            redis.start() if trouble == "killed" else redis.resume()
            await written(store)
            await until(store.membership.up.is_set)
            (await store.records.open(asked("new"))).close()
            assert (await read(await store.records.open(asked()))).tokens == [*tokens(1, 2)]

    asyncio.run(main())


def test_a_record_of_which_the_server_dropped_a_part_is_generated_again(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as store, Redis.from_url(redis.url) as client:
            call = await store.records.open(asked())
            await read(call, Delta(tokens(1, 2)), Finished(FinishReason.STOP))
            call.close()
            await written(store)
            await client.delete(KEYS.tokens("/r"))
            call = await store.records.open(asked(seed=9))
            answer = await read(call, Delta(tokens(1, 2)), Finished(FinishReason.STOP))
            call.close()
            assert (answer.sent, call.seed) == ((), 7)

    asyncio.run(main())


def test_records_expire(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis, ttl_s=60) as store, Redis.from_url(redis.url) as client:
            call = await store.records.open(asked())
            await read(call, Delta(tokens(1)))
            call.close()
            await written(store)
            for key in (KEYS.request("/r"), KEYS.tokens("/r")):
                assert 55_000 < await client.pttl(key) <= 60_000

    asyncio.run(main())


def test_no_prompt_and_no_password_is_recorded(redis: RedisServer) -> None:
    async def main() -> None:
        async with proxy(redis) as store, Redis.from_url(redis.url) as client:
            (await store.records.open(asked())).close()
            assert {name.decode() for name in await client.hgetall(KEYS.request("/r"))} == {
                *("fingerprint", "model", "state", "owner", "arrival_ms", "ttft_ms", "tbt_ms"),
                *("sampling", "seed", "sequences"),
            }

    asyncio.run(main())
