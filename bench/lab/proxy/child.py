"""Processes of a measurement: each with what it is told, and on the core it is meant for."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from msgspec import Struct

from aegis.core.errors import UserError
from aegis.process.child import follow_launcher
from bench.common.processes import end

_START_S = 180.0
_STOP_S = 10.0
_POLL_S = 0.05
_LAST_WORDS = 60


class Cores(Struct, frozen=True):
    """`proxy` is for the proxy that is measured, `rest` for all others: the client, backends, stores. If there is only
    one core, all share it."""

    proxy: int
    rest: tuple[int, ...]

    @classmethod
    def of_this_process(cls) -> Cores:
        *rest, last = sorted(os.sched_getaffinity(0))
        return cls(last, tuple(rest) or (last,))


@contextmanager
def kept_to(cores: Sequence[int]) -> Iterator[None]:
    """This process, and what it starts meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Child:
    """A process that listens at a port; `log` is where it writes."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.pid = process.pid
        self._process = process
        self._log = log

    def wait_until_answers(self, url: str) -> None:
        """200. Raises UserError, with its last words, where it does not come up."""
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                if httpx.get(url, trust_env=False, timeout=_START_S).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(_POLL_S)
        raise UserError(f"a proxy did not come up: {' '.join(self.said().split()[-_LAST_WORDS:])}")

    def said(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def line(self) -> str:
        """The first that it writes. Raises UserError."""
        deadline_s = time.monotonic() + _START_S
        while "\n" not in self.said():
            if time.monotonic() > deadline_s or self._process.poll() is not None:
                raise UserError(f"a backend did not come up: {self.said()}")
            time.sleep(_POLL_S)
        return self.said().partition("\n")[0]


@contextmanager
def running(
    command: Sequence[str],
    *,
    told: bytes = b"",
    core: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    """Ended afterwards. It is `told` something on standard input, and stays on its core."""

    def begin() -> None:
        follow_launcher()
        if core is not None:
            os.sched_setaffinity(0, {core})

    with tempfile.NamedTemporaryFile(prefix="aegis-bench-", suffix=".log") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=begin,
        )
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(told)
        try:
            yield Child(process, Path(log.name))
        finally:
            end(process, signal.SIGTERM, within_s=_STOP_S)
