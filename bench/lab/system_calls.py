"""The bytes that processes send, recorded by strace: each system call that puts bytes into a socket, a pipe or a
file."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from aegis.core.errors import UserError
from aegis.process.error_lines import flattened

_CALLS = "sendto,sendmsg,sendmmsg,write,writev,connect"
_HOW = ("-f", "-yy", "-ttt", "-s", "0", "-e", f"trace={_CALLS}", "-e", "signal=none")
_CALL = re.compile(r"(\d+) +(\d+\.\d+) (\w+)\(\d+<(.*?)>, (?:\{sa_family=\w+, (\S+))?")
_ADDRESS = re.compile(r'sun_path="(.*)"|sin6?_port=htons\((\d+)\)')
_ATTACHED = "attached"
_WITHIN_S = 30.0
_POLL_S = 0.01


class Send(NamedTuple):
    """A call: its time in seconds since 1970, its process, and the descriptor with both its ends. `connected` is the
    path or port that it was connected to meanwhile."""

    at_s: float
    process: int
    descriptor: str
    connected: str = ""


class Recorded:
    """The calls between two moments; to be asked when the recording has ended."""

    def __init__(self) -> None:
        self.sends: Sequence[Send] = ()


def check() -> None:
    """Raises UserError if there is no strace."""
    if shutil.which("strace") is None:
        raise UserError("there is no strace here; on Debian: apt-get install strace")


@contextmanager
def recorded(processes: Collection[int]) -> Iterator[Recorded]:
    """All threads of these processes are watched within. Raises UserError if that is not allowed."""
    outcome = Recorded()
    threads = {int(task.name): pid for pid in processes for task in Path(f"/proc/{pid}/task").iterdir()}
    with tempfile.TemporaryDirectory(prefix="aegis-") as directory:
        trace, told = Path(directory, "trace"), Path(directory, "told")
        command = ["strace", *_HOW, "-o", str(trace)]
        with told.open("wb") as errors:
            watching = subprocess.Popen([*command, *(f"-p{pid}" for pid in processes)], stderr=errors)
        try:
            _wait_until_attached(watching, told, len(processes))
            yield outcome
        finally:
            watching.send_signal(signal.SIGINT)  # lets go of them
            watching.wait(_WITHIN_S)
        outcome.sends = list(read(trace.read_text(errors="replace"), threads))


def read(trace: str, threads: dict[int, int]) -> Iterator[Send]:
    """The calls in a trace; `threads` are of which process. One that another interrupts counts where it began."""
    connected: dict[str, str] = {}
    for call in _CALL.finditer(trace):
        thread, descriptor = int(call[1]), call[4]
        if call[5] and (address := _ADDRESS.match(call[5])):
            connected[descriptor] = address[1] or address[2]
        yield Send(float(call[2]), threads.get(thread, thread), descriptor, connected.get(descriptor, ""))


def _wait_until_attached(watching: subprocess.Popen[bytes], told: Path, count: int) -> None:
    deadline_s = time.monotonic() + _WITHIN_S
    while told.read_text(errors="replace").count(_ATTACHED) < count:
        if watching.poll() is not None or time.monotonic() > deadline_s:
            raise UserError(f"strace does not watch the server: {flattened(told.read_text(errors='replace'))}")
        time.sleep(_POLL_S)
