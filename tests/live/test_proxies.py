"""Several proxies serve one pool: their streams are exact, and one that is killed takes only its own with it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.live.market import MARKET, Reference
from tests.live.server import SPLIT, Server, eventually, launched
from tests.live.streams import Body, Stream, client_of, until
from tests.live.test_exactness import clear_case

STREAMS_PER_MODEL = 4
STREAMS = 32
LATER = "proxy-1"
LONG_TOKENS = 600
WAITING = 4
HANDED_OVER = 2  # at one moment; how many there ever are differs from run to run


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path, tight_memory: str
) -> Iterator[Server]:
    options = ["--models", str(checkpoints_dir), "--dtype", "float32", "--device-memory", tight_memory]
    options += ["--slo", "ttft=1,tbt=0.1", "--proxies", "2", *SPLIT]
    with launched(tmp_path_factory.mktemp("proxies"), cache, *options, "--debug-memory") as running:
        running.wait_for_ready()
        yield running


async def proxies_of(streams: Sequence[Stream], client: httpx.AsyncClient) -> None:
    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(_run(stream, client))


async def _run(stream: Stream, client: httpx.AsyncClient) -> None:
    try:
        await stream.run(client)
    except httpx.TransportError as error:
        stream.error = {"message": type(error).__name__}


Cases = list[tuple[Body, list[int]]]


@pytest.fixture(scope="module")
def cases(references: dict[str, Reference]) -> Cases:
    """What is asked, and what is answered."""
    drawn = [clear_case(model, n, references[model]) for n in range(STREAMS_PER_MODEL) for model in MARKET]
    return [(case.body, case.expected.tokens) for case in drawn]


def spread(streams: Sequence[Stream]) -> Counter[str]:
    return Counter(stream.proxy for stream in streams)


def test_streams_over_two_proxies_are_what_transformers_generates(served: Server, cases: Cases) -> None:
    streams = [Stream(body) for body, _ in cases]

    async def main() -> None:
        async with client_of(served.url) as client:
            await proxies_of(streams, client)

    before = served.metrics()
    asyncio.run(main())
    assert [stream.error for stream in streams] == [None] * STREAMS
    assert [stream.tokens for stream in streams] == [tokens for _, tokens in cases]
    assert set(spread(streams)) == {"proxy-0", LATER}
    after = served.wait_for_freed_memory()
    assert after.total("request_success_total") - before.total("request_success_total") == STREAMS


def test_any_proxy_answers_for_the_whole(served: Server) -> None:
    def asked(path: str) -> dict[str, httpx.Response]:
        """Each proxy's answer."""
        answers: dict[str, httpx.Response] = {}
        eventually(lambda: answers.update(_by_proxy(served.get(path))) or len(answers) == 2, f"{path} of both")
        return answers

    for path in ("/v1/models", "/debug/memory", "/debug/node", "/health", "/ready"):
        assert {reply.status_code for reply in asked(path).values()} == {200}, path
    served.wait_for_freed_memory()
    for path in ("/v1/models", "/debug/node"):
        first, second = asked(path).values()
        assert first.json() == second.json()
    records = asked("/debug/records")
    assert records["proxy-0"].content == records[LATER].content
    assert served.post("/models/unload", {"model": "nobody"}).status_code == httpx.codes.NOT_FOUND


def _by_proxy(reply: httpx.Response) -> dict[str, httpx.Response]:
    return {reply.headers["x-aegis-proxy"]: reply}


def test_models_come_and_go_at_every_proxy(served: Server, checkpoints_dir: Path) -> None:
    for _ in range(4):  # through whichever proxy
        reply = served.post("/models/load", {"source": str(checkpoints_dir / "llama"), "name": "again"})
        assert reply.status_code == httpx.codes.OK, reply.text
        seen = {_answered(served, "again") for _ in range(12)}
        assert seen == {httpx.codes.OK}
        assert served.post("/models/unload", {"model": "again"}).status_code == httpx.codes.OK
        eventually(
            lambda: {_answered(served, "again") for _ in range(12)} == {httpx.codes.NOT_FOUND}, "gone everywhere"
        )


def _answered(server: Server, model: str) -> int:
    return server.post("/v1/completions", {"model": model, "prompt": [5, 6], "max_tokens": 2}).status_code


def test_a_killed_proxy_takes_only_its_own_streams_with_it(served: Server, cases: Cases) -> None:
    streams = [Stream(body) for body, _ in cases]
    long_ones = [
        Stream({"model": model, "prompt": [7, 8, 9], "max_tokens": LONG_TOKENS, "ignore_eos": True})
        for model in MARKET
        for _ in range(2)
    ]
    before, pid = served.metrics(), served.pid_of(LATER)

    async def main() -> None:
        async with client_of(served.url) as client, asyncio.TaskGroup() as group:
            group.create_task(proxies_of([*streams, *long_ones], client))
            every = [*streams, *long_ones]
            await until(lambda: sum(map(_waits_for_its_turn, every)) >= HANDED_OVER, "KV was handed over for it")
            os.kill(pid, signal.SIGKILL)
            await until(lambda: all(stream.ended for stream in every if stream.proxy == LATER), "its streams end")
            for stream in long_ones:
                stream.leave()

    asyncio.run(main())
    assert spread(streams)["proxy-0"] and spread([*streams, *long_ones])[LATER]
    for stream, (_, tokens) in zip(streams, cases, strict=True):
        if stream.proxy == "proxy-0":
            assert (stream.error, stream.tokens) == (None, tokens)
        else:
            assert stream.tokens == tokens[: len(stream.tokens)]
    eventually(served.ready, "/ready answers 200 again")
    assert served.pid_of(LATER) != pid
    after = served.wait_for_freed_memory()
    assert after.total("instance_restarts_total") == before.total("instance_restarts_total")
    assert "Traceback" not in served.output()


def test_streams_of_a_killed_proxy_are_whole_at_their_retries(served: Server, cases: Cases) -> None:
    streams = [Stream(body | {"request_id": f"retried-{n}"}) for n, (body, _) in enumerate(cases)]
    retries: list[Stream] = []
    before, pid = served.metrics(), served.pid_of(LATER)

    async def main() -> None:
        async with client_of(served.url) as client, asyncio.TaskGroup() as group:
            group.create_task(proxies_of(streams, client))
            await until(lambda: sum(map(_is_in_the_middle, streams)) >= WAITING, "its streams are in the middle")
            os.kill(pid, signal.SIGKILL)
            await until(lambda: all(stream.ended for stream in streams if stream.proxy != "proxy-0"), "its streams end")
            broken = [stream for stream in streams if stream.error]
            retries.extend(await asyncio.gather(*(_retried(stream, client) for stream in broken)))

    asyncio.run(main())
    broken = [stream for stream in streams if stream.error]
    begun = [stream for stream in broken if stream.proxy]
    assert len(begun) >= WAITING
    assert {stream.proxy for stream in begun} == {LATER}
    assert all(stream.error == {"message": "RemoteProtocolError"} for stream in begun)  # the body ended early
    assert {stream.proxy for stream in retries} == {"proxy-0"}
    answers = {id(stream): stream for stream in streams if not stream.error}
    answers |= {id(stream): retry for stream, retry in zip(broken, retries, strict=True)}
    assert [answers[id(stream)].tokens for stream in streams] == [tokens for _, tokens in cases]
    eventually(served.ready, "/ready answers 200 again")
    after = served.wait_for_freed_memory()
    assert after.total("store_taken_over_total") - before.total("store_taken_over_total") >= len(begun)
    assert "Traceback" not in served.output()


def _is_in_the_middle(stream: Stream) -> bool:
    return stream.proxy == LATER and len(stream.tokens) > 1 and not stream.ended


async def _retried(stream: Stream, client: httpx.AsyncClient) -> Stream:
    """The same again, until it is known that nobody answers it any more."""
    while True:
        retry = Stream(stream.body)
        await retry.run(client)
        if not retry.error or retry.error["code"] != "request_in_flight":
            return retry


def _waits_for_its_turn(stream: Stream) -> bool:
    """It is one of the later proxy's, prefilled and not decoded yet."""
    return stream.proxy == LATER and len(stream.tokens) == 1


def test_an_instance_that_is_killed_is_lost_to_both(served: Server, cases: Cases) -> None:
    streams = [Stream(body) for body, _ in cases]
    restarts = served.metrics().total("instance_restarts_total")

    async def main() -> None:
        async with client_of(served.url) as client, asyncio.TaskGroup() as group:
            group.create_task(proxies_of(streams, client))
            for instance in ("decode-0", "prefill-0"):
                begun = sum(len(stream.tokens) for stream in streams)
                await until(lambda: sum(len(s.tokens) for s in streams) >= begun + STREAMS, "some run")  # noqa: B023
                os.kill(served.pid_of(instance), signal.SIGKILL)

    asyncio.run(main())
    assert set(spread(streams)) == {"proxy-0", LATER}
    assert [stream.error for stream in streams] == [None] * STREAMS
    assert [stream.tokens for stream in streams] == [tokens for _, tokens in cases]
    eventually(served.ready, "/ready answers 200 again")
    assert served.wait_for_freed_memory().total("instance_restarts_total") == restarts + 2
    assert "Traceback" not in served.output()


def test_a_proxy_that_hangs_while_an_instance_dies_is_lost_too(served: Server, cases: Cases) -> None:
    """It cannot say that it knows, and others do not wait for ever."""
    streams = [Stream(body) for body, _ in cases]
    before, pid = served.metrics(), served.pid_of(LATER)

    async def main() -> None:
        async with client_of(served.url) as client, asyncio.TaskGroup() as group:
            group.create_task(proxies_of(streams, client))
            await until(lambda: sum(len(stream.tokens) for stream in streams) >= STREAMS, "some run")
            os.kill(pid, signal.SIGSTOP)
            os.kill(served.pid_of("decode-0"), signal.SIGKILL)

    asyncio.run(main())
    assert spread(streams)["proxy-0"]
    for stream, (_, tokens) in zip(streams, cases, strict=True):
        if stream.proxy == "proxy-0":
            assert (stream.error, stream.tokens) == (None, tokens)
        else:
            assert stream.tokens == tokens[: len(stream.tokens)]
    eventually(served.ready, "/ready answers 200 again")
    assert served.pid_of(LATER) != pid
    after = served.wait_for_freed_memory()
    assert after.total("instance_restarts_total") == before.total("instance_restarts_total") + 1
    assert "Traceback" not in served.output()


def test_a_signal_ends_all_proxies_and_tells_every_client(
    tmp_path: Path, cache: Path, checkpoints_dir: Path, tight_memory: str
) -> None:
    options = ["--models", str(checkpoints_dir / "llama"), "--dtype", "float32", "--device-memory", tight_memory]
    streams = [
        Stream({"model": "llama", "prompt": [7, 8], "max_tokens": LONG_TOKENS, "ignore_eos": True})
        for _ in range(STREAMS)
    ]

    async def main(server: Server) -> None:
        async with client_of(server.url) as client, asyncio.TaskGroup() as group:
            group.create_task(proxies_of(streams, client))
            await until(lambda: all(len(stream.tokens) > 2 for stream in streams), "all are running")
            assert await asyncio.to_thread(server.stop, signal.SIGTERM) == 0

    with launched(tmp_path / "server", cache, *options, "--proxies", "3") as server:
        server.wait_for_ready()
        asyncio.run(main(server))
        assert "Traceback" not in server.output()
    assert len(spread(streams)) == 3
    for stream in streams:
        assert stream.done or (stream.error and stream.error["message"].startswith("the server is shutting down"))
