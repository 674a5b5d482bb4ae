"""Many connections that ask nothing, pages of elsewhere, processes that stand still and files that go: streams are what
they are without."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread, Timer
from urllib.parse import urlsplit

import httpx
import pytest

from tests.attacks.harness import HONEST, MEMORY, at_once, attacked, ends_soon, recorded, under_attack
from tests.attacks.wire import Wire
from tests.live.server import SPLIT, WAIT_S, Server, launched
from tests.live.streams import Body, Stream, run_all, until

CROWD = 10_000
FILES = 3 * CROWD // 2
CROWD_KIB = 256 << 10
"""What so many connections may take of a proxy: 25 KiB each, of which most are the objects of a transport, a parser
and a protocol. So they cannot fit into the 64 MiB of other attacks, as 2 500 would. Those that come again show that
the room is used anew."""
LEAVING_S = 0.5
"""The proxy is told of all of them leaving at once, and looks at each before it looks at anything else. It is no
`HEALTH_S`, for the process that leaves takes one of two processors meanwhile."""
STAND_STILL_S = 3.0
LONG_BODY: Body = HONEST | {"max_tokens": 1500}
HOSTS = ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "evil@127.0.0.1"]
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nX-A: " + b"b" * 500


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory, cache: Path, checkpoints_dir: Path) -> Iterator[Server]:
    """It, and this process, may have as many files open as a crowd takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES:
        pytest.skip(f"no more than {hard} files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FILES), hard))
    try:
        models = ["--models", str(checkpoints_dir / "llama")]
        with attacked(tmp_path_factory.mktemp("crowded"), cache, *models) as running:
            yield running
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def crowd(server: Server, said: bytes) -> Iterator[list[socket.socket]]:
    address = urlsplit(server.url)
    with ExitStack() as stack:
        connections = []
        for _ in range(CROWD):
            connection = stack.enter_context(socket.create_connection((address.hostname, address.port), WAIT_S))
            if said:
                connection.sendall(said)
            connections.append(connection)
        yield connections


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.parametrize("said", [b"", b"P", HALF], ids=["nothing", "a letter", "half a head"])
def test_ten_thousand_that_ask_nothing_disturb_nobody(crowded: Server, said: bytes) -> None:
    with (
        under_attack(crowded, f"{CROWD} that say {len(said)} bytes", growth_kib=CROWD_KIB, health_s=LEAVING_S),
        crowd(crowded, said),
    ):
        for _ in range(20):
            assert crowded.post("/v1/completions", HONEST).status_code == httpx.codes.OK


@pytest.mark.alone
@pytest.mark.long
def test_ten_thousand_that_come_again_find_the_same_room(crowded: Server) -> None:
    with crowd(crowded, HALF):
        pass
    with (
        under_attack(crowded, f"{CROWD} for the second time", growth_kib=CROWD_KIB // 4, health_s=LEAVING_S),
        crowd(crowded, HALF),
    ):
        pass


@pytest.mark.parametrize("path", ["/models/load", "/models/unload", "/debug/memory", "/debug/records"])
@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "evil@127.0.0.1"]
)
def test_a_page_of_elsewhere_commands_nothing(server: Server, path: str, host: str) -> None:
    method = b"POST" if path.startswith("/models") else b"GET"
    body = b'{"model": "llama", "source": "/"}'
    head = b"%s %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with Wire(server.url) as wire:
        wire.send(head % (method, path.encode(), host.encode(), len(body)) + body)
        heard = wire.hear(count=1)
    assert heard.statuses in ([403], [400]), heard
    assert server.get("/v1/models").json()["data"]


def stopped_in_the_middle(server: Server, pid: int) -> Stream:
    """A stream of which the middle came while the process stood still for a while."""

    async def stop(streams: object) -> None:
        (stream,) = streams  # type: ignore[misc]
        await until(lambda: len(stream.tokens) > 20, "it streams")
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(STAND_STILL_S)  # what is tested is this long
        finally:
            _resume(pid)

    (stream,) = run_all(server.url, [LONG_BODY], stop)
    return stream


@pytest.mark.long
@pytest.mark.parametrize("which", ["proxy", "instance"])
def test_a_process_that_stood_still_goes_on(server: Server, which: str) -> None:
    expected = recorded(server, LONG_BODY)
    pid = server.process.pid if which == "proxy" else server.pid_of("mixed-0")
    stream = stopped_in_the_middle(server, pid)
    assert stream.error is None and stream.done and stream.tokens == expected


@pytest.mark.long
@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_requests_of_an_instance_that_stands_still_go_on(
    tmp_path: Path, cache: Path, checkpoints_dir: Path, name: str
) -> None:
    """It is taken for dead, and another one started in its place."""
    models = ["--models", str(checkpoints_dir / "llama"), "--dtype", "float32"]
    with launched(tmp_path / "server", cache, *models, "--device-memory", MEMORY, *SPLIT) as server:
        server.wait_for_ready()
        expected, pid = recorded(server, HONEST), server.pid_of(name)
        os.kill(pid, signal.SIGSTOP)
        going_on = Timer(STAND_STILL_S, lambda: _resume(pid))
        going_on.start()
        try:
            asked = HONEST | {"return_token_ids": True}
            replies = at_once(lambda _: server.post("/v1/completions", asked), 6)
        finally:
            going_on.join()
        assert [reply.json()["choices"][0]["token_ids"] for reply in replies] == [expected] * 6
        server.wait_for_ready()


def _resume(pid: int) -> None:
    with suppress(ProcessLookupError):  # taken for dead, and killed
        os.kill(pid, signal.SIGCONT)


@pytest.mark.long
def test_a_checkpoint_that_is_deleted_is_served_on(tmp_path: Path, cache: Path, checkpoints_dir: Path) -> None:
    for name in ("llama", "qwen2", "qwen3"):
        shutil.copytree(checkpoints_dir / name, tmp_path / "models" / name)
    with attacked(
        tmp_path / "server", cache, "--models", str(tmp_path / "models"), "--device-memory", "24MiB"
    ) as server:
        bodies = [LONG_BODY | {"model": name} for name in ("llama", "qwen2", "qwen3")]
        before = [recorded(server, body) for body in bodies]

        async def delete(streams: object) -> None:
            await until(lambda: any(stream.tokens for stream in streams), "one streams")  # type: ignore[attr-defined]
            shutil.rmtree(tmp_path / "models")

        streams = run_all(server.url, bodies, delete)
        assert [stream.tokens for stream in streams] == before
        chat = {"model": "qwen2", "messages": [{"role": "user", "content": "the cat"}], "max_tokens": 2}
        assert server.post("/v1/chat/completions", chat).status_code == httpx.codes.OK
        assert server.get("/v1/models").status_code == httpx.codes.OK


@pytest.mark.long
@pytest.mark.alone
def test_it_ends_soon_in_the_middle_of_streams(tmp_path: Path, cache: Path, checkpoints_dir: Path) -> None:
    with attacked(tmp_path / "server", cache, "--models", str(checkpoints_dir / "llama")) as server:
        took_s: list[float] = []

        async def end(streams: object) -> None:
            await until(lambda: all(len(stream.tokens) > 5 for stream in streams), "all stream")  # type: ignore[attr-defined]
            thread = Thread(target=lambda: took_s.append(ends_soon(server)))
            thread.start()
            await until(lambda: not thread.is_alive(), "it has ended")

        endless = LONG_BODY | {"max_tokens": 4000}
        streams = run_all(server.url, [endless] * 8, end)
        assert took_s
        for stream in streams:
            assert stream.done or (stream.error and stream.error["message"].startswith("the server is shutting down"))
