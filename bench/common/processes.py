"""Processes and what they have used, as proc(5) tells."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def cpu_s(root: int, command: str = "") -> float:
    """Processor time so far of a process and all below it, or of those among them with `command` in their command
    lines; also that of their children that have ended."""
    processes = _processes()
    found = [pid for pid in _family(root, processes) if pid in processes and command in command_of(pid)]
    return sum(processes[pid][1] for pid in found)


def family(root: int) -> set[int]:
    """A process and all below it."""
    return _family(root, _processes())


def command_of(pid: int) -> str:
    """The command line of the process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def resident_bytes(pid: int) -> int:
    """The bytes of the machine's memory that it holds, including those that it shares with others."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def shared_out_bytes(processes: Iterable[int]) -> int:
    """The memory that they hold together: a page that n processes of the machine share counts as an nth in each."""
    return sum(_proportional_bytes(pid) for pid in processes)


def end(process: subprocess.Popen[bytes], number: signal.Signals, *, within_s: float) -> None:
    """Ends the process with the signal, or else without asking."""
    process.send_signal(number)
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


@contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does: what was made for a while is removed, and what was started is ended.
    In another thread than the main one, it stays as it was."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # what is being cleaned up is cleaned up
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _family(root: int, processes: Mapping[int, tuple[int, float]]) -> set[int]:
    found, grown = {root}, True
    while grown:
        more = {pid for pid, (parent, _) in processes.items() if parent in found} - found
        found |= more
        grown = bool(more)
    return found


def _processes() -> dict[int, tuple[int, float]]:
    """Parent and processor time of every process, with that of its children that have ended."""
    found: dict[int, tuple[int, float]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found[int(entry.name)] = int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return found
