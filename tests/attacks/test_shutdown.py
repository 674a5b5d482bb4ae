"""SIGTERM ends a server soon, whatever its clients do; who streams is told. What never comes back is ended, too."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.attacks.harness import HONEST, attacked, ends_soon, recorded
from tests.attacks.wire import Wire, request
from tests.live.server import ROOT, WAIT_S, Server, leaves_nothing
from tests.live.streams import Stream, run_all, until

HALF_SENT = 50
UNREAD = 5
ENDLESS = HONEST | {"max_tokens": 4000}
LAST_S = 16.0
"""That the end may take where nothing of the orderly one works and nobody has time to finish."""

HANGS = """
import ctypes, os, sys, threading, time

def hang():
    while not os.path.exists({file!r}):
        time.sleep(0.01)
    ctypes.PyDLL(None).sleep(1000)  # and keeps the interpreter to itself

if "launch" in sys.orig_argv:
    threading.Thread(target=hang, daemon=True).start()
"""


@contextmanager
def hanging_connections(server: Server) -> Iterator[None]:
    body = json.dumps(ENDLESS | {"stream": True}).encode()
    whole = request("/v1/completions", body)
    with ExitStack() as stack:
        for _ in range(UNREAD):
            wire = stack.enter_context(Wire(server.url))
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            assert wire.send(whole)
        for _ in range(HALF_SENT):
            assert stack.enter_context(Wire(server.url)).send(whole[:-10])
        yield


@pytest.mark.parametrize("proxies", [1, 2])
def test_nobody_who_hangs_keeps_it_from_ending(
    tmp_path: Path, cache: Path, checkpoints_dir: Path, proxies: int
) -> None:
    options = ["--models", str(checkpoints_dir / "llama"), "--proxies", str(proxies)]
    with attacked(tmp_path / "server", cache, *options) as server, hanging_connections(server):

        async def end(streams: list[Stream]) -> None:
            await until(lambda: all(stream.tokens for stream in streams), "all stream")
            await asyncio.to_thread(ends_soon, server)

        streams = run_all(server.url, [ENDLESS] * proxies, end)  # type: ignore[arg-type]
        for stream in streams:
            assert stream.error and stream.error["message"].startswith("the server is shutting down")
    assert "Traceback" not in server.output()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_thread_that_keeps_the_interpreter_does_not_keep_it_from_ending(
    tmp_path: Path, cache: Path, checkpoints_dir: Path, number: signal.Signals
) -> None:
    hangs = tmp_path / "hangs"
    (tmp_path / "sitecustomize.py").write_text(HANGS.format(file=str(hangs)))
    options = ["--models", str(checkpoints_dir / "llama"), "--shutdown-timeout", "0"]
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    with attacked(tmp_path / "server", cache, *options, environment=environment) as server:
        recorded(server)
        hangs.touch()
        with pytest.raises(httpx.TimeoutException):
            httpx.get(server.url + "/health", timeout=1, trust_env=False)
        began_s = time.monotonic()
        server.process.send_signal(number)
        assert server.process.wait(WAIT_S) == -signal.SIGKILL
        assert LAST_S - 2 < time.monotonic() - began_s < LAST_S + 2
        leaves_nothing(server)
