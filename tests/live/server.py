"""A server as users run it: `aegis launch` in a process of its own, on a free port, with a log of its own.

However a test ends, the server is ended too, and then nothing of it may be left: no process, no temporary file.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TypeVar

import httpx

from tests.live.metrics import Metrics

T = TypeVar("T")

START_S = 180.0
WAIT_S = 120.0
STOP_S = 30.0
SPLIT = ("--prefill", "1", "--decode", "1")
"""KV is handed over."""
ROOT = Path(__file__).parents[2]

_POLL_S = 0.02


def eventually(condition: Callable[[], T], what: str, within_s: float = WAIT_S) -> T:
    """The first result of `condition` that is true; fails where there is none in time."""
    deadline_s = time.monotonic() + within_s
    while not (result := condition()):
        assert time.monotonic() < deadline_s, f"not within {within_s:.0f} s: {what}"
        time.sleep(_POLL_S)
    return result


def processes_of(session: int) -> dict[int, str]:
    """Living processes of a session by id, with their command lines; the server is launched in one of its own."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            state, _, _, its_session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


class Server:
    """A running `aegis launch`. Without `verify=False`, httpx loads certificates for each request, though no address is
    https: that takes nine tenths of a request's processor time, and whoever waits asks fifty times a second."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, scratch: Path) -> None:
        self.process = process
        self.log = log
        self.scratch = scratch
        self.url = ""

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=WAIT_S, trust_env=False, verify=False)

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=WAIT_S, trust_env=False, verify=False)

    def metrics(self) -> Metrics:
        return Metrics(self.get("/metrics").text)

    def ready(self) -> bool:
        return self.get("/ready").status_code == httpx.codes.OK

    def pid_of(self, instance: str) -> int:
        """The process that serves the instance now."""
        (pid,) = [pid for pid, command in processes_of(self.process.pid).items() if command.split()[-1:] == [instance]]
        return pid

    def wait_for_ready(self) -> None:
        eventually(self._is_up, "/ready answers 200", START_S)

    def wait_for_freed_memory(self) -> Metrics:
        """Until every page, block and reservation is free again and no request is left."""
        return eventually(self._freed, "memory is free again")

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """Ends it as a user does, in a terminal with Ctrl-C, and returns the exit code."""
        _signal(self.process, number)
        return self.process.wait(STOP_S)

    def _is_up(self) -> bool:
        assert self.process.poll() is None, f"aegis launch ended with code {self.process.returncode}:\n{self.output()}"
        if not self.url:
            told = re.search(r" models? on (https?://\S+)\n", self.output())
            if not told:
                return False
            self.url = told[1]
        try:
            return self.ready()
        except httpx.TransportError:
            return False

    def _freed(self) -> Metrics | None:
        metrics = self.metrics()
        return metrics if not metrics.held() else None


@contextmanager
def launched(
    directory: Path, cache: Path, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """`aegis launch` with these options; it may not be ready yet. On leaving it is ended, if it has not ended, and
    must have left nothing behind."""
    directory.mkdir(parents=True, exist_ok=True)
    scratch = Path(mkdtemp())  # the path of a socket in it may have 107 characters
    log = directory / "log"
    command = [sys.executable, "-m", "aegis.cli.main", "launch", "--port", "0", *options]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "AEGIS_CACHE": str(cache), "TMPDIR": str(scratch)}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=directory,
            env=variables | dict(environment or {}),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process, log, scratch)
    try:
        yield server
        _end(process)
        leaves_nothing(server)
    finally:
        _end_by_force(process)
        rmtree(scratch, ignore_errors=True)


def no_orphans(server: Server) -> None:
    session = server.process.pid
    eventually(lambda: not processes_of(session), f"no orphans, but {processes_of(session)}", STOP_S)


def leaves_nothing(server: Server) -> None:
    """Fails where a process of the server is still there, or a temporary file, however it ended."""
    no_orphans(server)
    left = [entry for entry in Path("/dev/shm").iterdir() if "aegis" in entry.name]
    left += server.scratch.rglob("*")
    assert not left, f"left behind: {left}"


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        _signal(process, signal.SIGINT)
        process.wait(STOP_S)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)


def _end_by_force(process: subprocess.Popen[bytes]) -> None:
    """Ends it by force, so that nothing of it runs on beside the next test."""
    for pid in processes_of(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
