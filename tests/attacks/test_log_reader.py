"""A log that nobody reads: the server serves on, tells how much was lost once somebody reads, and can be ended."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.attacks.harness import END_S, MEMORY, under_attack
from tests.live.server import ROOT, START_S, Server, eventually, processes_of

pytestmark = pytest.mark.alone

REQUESTS = 4_000
NOBODY = "x" * 256
"""A model's name, so that the lines of all requests are more than what a pipe holds and what waits to be read."""


def test_a_log_that_nobody_reads_stops_nothing(tmp_path: Path, cache: Path, checkpoints_dir: Path) -> None:
    reading, writing = os.pipe()
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    options = ["--port", "0", "--models", str(checkpoints_dir), "--dtype", "float32", "--device-memory", MEMORY]
    process = subprocess.Popen(
        [sys.executable, "-m", "aegis.cli.main", "launch", *options, "--mixed", "1", "--log-level", "debug"],
        stdout=writing,
        stderr=writing,
        env=os.environ | {"PYTHONPATH": str(ROOT), "AEGIS_CACHE": str(cache), "TMPDIR": str(scratch)},
        start_new_session=True,
    )
    os.close(writing)
    server = Server(process, tmp_path / "log", scratch)
    try:
        read = _read_until(reading, b"Ctrl-C stops everything.\n")
        server.url = "http://" + read.split(b" models on http://")[1].split()[0].decode()
        eventually(server.ready, "/ready answers 200")
        with under_attack(server, "a log that nobody reads"), ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: _ask(server), range(4)))
        dropped = server.metrics().total("log_lines_dropped_total")
        assert dropped > 0, "the pipe was full"
        told = _read_until(reading, b"the log was not read lines_dropped=")
        assert told.count(b" request request_id=") > 1000
        _ask(server)  # and it is full again
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_S) == 0
        eventually(lambda: not processes_of(process.pid), "no orphans")
    finally:
        for pid in processes_of(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        os.close(reading)


def _ask(server: Server) -> None:
    """With the standard library's client, which takes a fifth of httpx's time."""
    with closing(HTTPConnection(server.url.removeprefix("http://"), timeout=60)) as client:
        for _ in range(REQUESTS // 4):
            client.request("GET", f"/v1/models/{NOBODY}", headers={"x-request-id": "x" * 128})
            with client.getresponse() as reply:
                assert reply.read() and reply.status == HTTPStatus.NOT_FOUND


def _read_until(reading: int, end: bytes) -> bytes:
    read = b""
    while end not in read:
        ready, _, _ = select.select([reading], [], [], START_S)
        part = os.read(reading, 1 << 16) if ready else b""
        if not part:
            pytest.fail(read.decode()[-2000:])
        read += part
    return read
