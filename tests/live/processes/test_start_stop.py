"""Starting and stopping: what cannot start says why in one line, what stops leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest

from tests import checkpoints
from tests.live.server import ROOT, Server, eventually, launched, leaves_nothing, processes_of
from tests.live.streams import Body, Stream, client_of, until
from tests.long_forms import first_rows_of

COMMAND_S = 60
STREAMS = 16
INSTANCES = 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its context is long enough for requests that outlive the server."""
    return checkpoints.write(tmp_path_factory.mktemp("long") / "long", "llama", max_position_embeddings=1 << 16)


ENDLESS: Body = {"model": "long", "prompt": [5, 6, 7], "max_tokens": 50_000, "ignore_eos": True}


# --- what cannot start ----------------------------------------------------------------------------------------------


def refused(directory: Path, *options: str) -> str:
    """The one line with which `aegis launch` ends."""
    command = [sys.executable, "-m", "aegis.cli.main", "launch", "--port", "0", *options]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "AEGIS_CACHE": str(directory / "cache")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=COMMAND_S, cwd=directory)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def test_a_taken_port_is_one_line(tmp_path: Path, checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in refused(tmp_path, "--models", str(checkpoint), "--port", str(port))


UNREADABLE: dict[str, tuple[str, str]] = {
    "no yaml": ("a: [", "config.yaml"),
    "no mapping": ("- 1", "config.yaml"),
    "unknown key": ("memory: {devise: 1GiB}", "devise"),
    "wrong type": ("instances: {decode: many}", "decode"),
    "wrong size": ("memory: {device: 3 bananas}", "bananas"),
}


@pytest.mark.parametrize(("content", "told"), first_rows_of(2, list(UNREADABLE.values())), ids=UNREADABLE)
def test_a_configuration_that_cannot_be_read_is_one_line(tmp_path: Path, content: str, told: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(content)
    assert told in refused(tmp_path, "--config", str(file))


@pytest.mark.parametrize(
    ("options", "told"),
    first_rows_of(
        2,
        [
            (("--config", "nowhere.yaml"), "nowhere.yaml"),
            (("--models", "./nowhere"), "nowhere"),
            (("--device-memory", "0"), "device"),
            (("--decode", "0"), "decode"),
            (("--host-memory", "2MiB"), "host"),
            (("--frobnicate",), "--frobnicate"),
            (("--redis", "redis://:secret@127.0.0.1:1/0"), "redis://127.0.0.1:1/0: connection refused"),
            (("--redis", "http://:secret@127.0.0.1"), "redis://"),
            (("--redis-prefix", "a b"), "redis-prefix"),
        ],
    ),
)
def test_what_cannot_be_launched_is_one_line(tmp_path: Path, options: Sequence[str], told: str) -> None:
    assert told in refused(tmp_path, *options)


# --- what stops -----------------------------------------------------------------------------------------------------


def _running(directory: Path, checkpoint: Path, act: Callable[[Server, Sequence[Stream]], None]) -> list[Stream]:
    """Launches a server, and has `act` done to it when 16 streams run; returns what became of them."""
    streams = [Stream(ENDLESS) for _ in range(STREAMS)]

    async def one(stream: Stream, client: httpx.AsyncClient) -> None:
        try:
            await stream.run(client)
        except httpx.TransportError as error:
            stream.error = {"message": "", "type": type(error).__name__}

    async def main(server: Server) -> None:
        async with client_of(server.url) as client, asyncio.TaskGroup() as group:
            for stream in streams:
                group.create_task(one(stream, client))
            await until(lambda: all(len(stream.tokens) > 2 for stream in streams), "all are running")
            await asyncio.to_thread(act, server, streams)

    options = ["--models", str(checkpoint), "--dtype", "float32", "--device-memory", "64MiB"]
    with launched(directory / "server", directory.parent / "cache", *options) as server:
        server.wait_for_ready()
        # The launcher, what tokenizes for it, what forks instances, the embedded broker and Redis, and who would
        # remove their directories or kill the launcher.
        eventually(lambda: len(processes_of(server.process.pid)) == 8 + INSTANCES, "all processes are there")
        assert set(server.metrics().instances()) == {"mixed-0", "mixed-1"}
        asyncio.run(main(server))
        leaves_nothing(server)
        assert "Traceback" not in server.output()
    return streams


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_a_signal_ends_the_server_and_tells_every_client(
    tmp_path: Path, checkpoint: Path, number: signal.Signals
) -> None:
    def stop(server: Server, streams: Sequence[Stream]) -> None:
        assert server.stop(number) == 0

    for stream in _running(tmp_path, checkpoint, stop):
        assert stream.error and stream.error["message"] == "the server is shutting down; try another one"
        assert stream.error["code"] == "shutting_down"


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start_ends_it_at_once(tmp_path: Path, checkpoint: Path, number: signal.Signals) -> None:
    with launched(tmp_path / "server", tmp_path / "cache", "--models", str(checkpoint)) as server:
        eventually(lambda: len(processes_of(server.process.pid)) >= 6 + INSTANCES, "its processes are starting")
        assert server.stop(number) == 130
        leaves_nothing(server)
        assert "Traceback" not in server.output()


@pytest.mark.parametrize("to_all", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_signal_while_a_checkpoint_is_registered_ends_it_quietly(
    tmp_path: Path, checkpoint: Path, to_all: bool
) -> None:
    with launched(tmp_path / "server", tmp_path / "cache", "--models", str(checkpoint)) as server:

        def is_registering() -> bool:
            return any("registrar_process" in line for line in processes_of(server.process.pid).values())

        eventually(is_registering, "a checkpoint is being registered")
        (os.killpg if to_all else os.kill)(server.process.pid, signal.SIGINT)
        assert server.process.wait(COMMAND_S) == 130
        said = server.output()
        assert "refused" not in said and "exception" not in said and "no model can be served" not in said, said


def test_a_signal_to_all_processes_while_the_demo_market_is_made_ends_it_quietly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "aegis.cli.main", "launch", "--demo", "--port", "0"]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "AEGIS_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True, start_new_session=True) as server:

        def is_making() -> bool:
            return any("aegis.cli.main demo" in line for line in processes_of(server.pid).values())

        eventually(is_making, "models are being made")
        os.killpg(server.pid, signal.SIGTERM)
        said = server.communicate(timeout=COMMAND_S)[1]
    assert server.returncode == 130
    assert "exception" not in said, said
