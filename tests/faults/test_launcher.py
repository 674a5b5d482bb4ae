"""The launcher, killed: nothing of the server is left, and another one answers what was asked of it. Whatever else ends
it ends all of it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from aegis.transport.unix_sockets import LocalWire
from tests.faults.figures import Figures
from tests.faults.pool import MARKET_OPTIONS
from tests.faults.trial import undergo
from tests.live.cases import Case
from tests.live.server import STOP_S, Server, eventually, launched, leaves_nothing, processes_of
from tests.long_forms import first_of
from tests.redis_server import redis_server

GONE_S = 2.0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def _kill(server: Server) -> None:
    server.process.kill()
    server.process.wait(STOP_S)
    eventually(lambda: not processes_of(server.process.pid), "nobody is left", GONE_S)
    leaves_nothing(server)


@pytest.mark.long
def test_it_is_killed_and_another_one_answers(
    tmp_path: Path, cache: Path, checkpoints_dir: Path, some_cases: Sequence[Case], moment: float, figures: Figures
) -> None:
    """With a Redis of the user's what was answered so far outlives it."""
    options = ["--models", str(checkpoints_dir), "--device-memory", "64MiB", "--port", str(_free_port())]
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server("valkey", tmp_path))
        options += [*MARKET_OPTIONS, "--redis", redis.url]

        def start(name: str) -> Server:
            server = stack.enter_context(launched(tmp_path / name, cache, *options))
            server.wait_for_ready()
            return server

        first = start("first")
        later: list[Server] = []

        async def strike() -> None:
            await asyncio.to_thread(_kill, first)
            later.append(await asyncio.to_thread(start, "second"))

        trial = undergo(first, some_cases, moment, strike)
        trial.verify(died=["proxy-0"])
        assert trial.broken
        figures.add("kill the launcher, start another", trial)
        assert later[0].metrics().total("store_taken_over_total") > 0
        later[0].wait_for_freed_memory()
        assert "Traceback" not in later[0].output()


def _registers(commands: Sequence[str]) -> bool:
    return any("registrar" in command for command in commands)


def _makes_the_demo(commands: Sequence[str]) -> bool:
    """Its workers do."""
    return sum("spawn_main" in command for command in commands) == 2


@pytest.mark.parametrize("starting", first_of(1, [_makes_the_demo, _registers]))
def test_it_is_killed_while_it_starts(
    tmp_path: Path, checkpoints_dir: Path, starting: Callable[[Sequence[str]], bool]
) -> None:
    options = ["--models", str(checkpoints_dir)] if starting is _registers else []
    with launched(tmp_path / "server", tmp_path / "cache", *options) as server:
        session = server.process.pid
        eventually(lambda: starting(list(processes_of(session).values())), "it is in the middle")
        server.process.kill()
        server.process.wait(STOP_S)
        eventually(lambda: not processes_of(session), "nobody is left", STOP_S)


@pytest.mark.long
def test_a_bug_in_its_main_task_ends_all_of_it(tmp_path: Path, cache: Path, checkpoints_dir: Path) -> None:
    """Nobody waits for ever for an answer that will not come."""
    with launched(tmp_path / "server", cache, "--models", str(checkpoints_dir), "--dtype", "float32") as server:
        server.wait_for_ready()
        (address,) = server.scratch.glob("aegis-*/node")
        wire = LocalWire.to(f"ipc://{address}", "stranger/1")
        wire.send(b"\xc1")  # no message begins like that
        assert server.process.wait(STOP_S) == 1
        wire.close()
        leaves_nothing(server)
    assert "ended by a bug" in server.output()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_it_dies_with_many_proxies_and_leaves_nothing(
    tmp_path: Path, cache: Path, checkpoints_dir: Path, number: int
) -> None:
    with launched(tmp_path / "server", cache, "--models", str(checkpoints_dir), "--proxies", "3") as server:
        server.wait_for_ready()
        os.kill(server.process.pid, number)
        server.process.wait(STOP_S)
        eventually(lambda: not processes_of(server.process.pid), "nobody is left", GONE_S)
