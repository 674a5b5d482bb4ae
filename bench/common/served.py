"""`aegis launch` in a process of its own, for measurements of a server as users have it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aegis.config.config import variable
from aegis.core.errors import UserError
from aegis.models.demo.market import make_market
from bench.common.processes import end, ended_in_order

_START_S = 180.0
_STOP_S = 30.0
_POLL_S = 0.05
_KEPT = {"AEGIS_TELEMETRY_SPANS": "2000000", "AEGIS_TELEMETRY_RECORDS": "500000"}


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    launcher: int
    """Its process."""
    began_s: float
    """On the monotonic clock, after the models were there."""


@contextmanager
def served(options: Sequence[str], *, remembers: bool = True) -> Iterator[str]:
    """The address of a server like that of `launched`."""
    with launched(options, remembers=remembers) as server:
        yield server.url


@contextmanager
def launched(options: Sequence[str], *, remembers: bool = True) -> Iterator[Served]:
    """A server with these options; it remembers all it does, or as much as servers do by default. It is ended
    afterwards. Raises UserError, with its last words, where it does not come up."""
    if "--models" not in options and "--config" not in options:
        make_market()  # else it would serve those first that are made first
    command = [sys.executable, "-m", "aegis.cli.main", "launch", "--port", "0", "--log-level", "warning", *options]
    with ended_in_order(), tempfile.NamedTemporaryFile(prefix="aegis-", suffix=".log") as log:
        began_s = time.monotonic()
        environment = environment_of(os.environ) | (_KEPT if remembers else {})
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield Served(_address(process, Path(log.name)), process.pid, began_s)
        finally:
            end(process, signal.SIGINT, within_s=_STOP_S)


def environment_of(ours: Mapping[str, str]) -> dict[str, str]:
    """Without the keys that commands send to other servers: this one would ask the measuring clients for them."""
    keys = {variable(("server", name)) for name in ("api_key", "api_key_file", "admin_key", "admin_key_file")}
    return {name: value for name, value in ours.items() if name not in keys}


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        said = log.read_text(encoding="utf-8", errors="replace")
        if told := re.search(r"^aegis serves \d+ models? on (\S+)\n", said, re.MULTILINE):
            return told[1]
        if process.poll() is not None:
            raise UserError(f"the server did not come up: {' '.join(said.split()[-40:])}")
        time.sleep(_POLL_S)
    raise UserError(f"the server did not come up within {_START_S:.0f} s")
