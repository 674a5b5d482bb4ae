"""A process that was told to end is killed if it does not, and only then."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

WITHIN_S = 2
WAIT_S = 20.0
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]

PROGRAM = f"""
import asyncio, ctypes, sys, threading
from aegis.process.forced_exit import killed_after_signal, on_signals

async def main():
    heard = asyncio.Event()
    with killed_after_signal({WITHIN_S}) as shell:
        on_signals(lambda: print("other", flush=True), shell)
        on_signals(lambda: (print("heard", flush=True), heard.set()), shell)
        print("ready", flush=True)
        {{block}}

asyncio.run(main())
print("ended", flush=True)
"""
ENDS = "await heard.wait()"
HANGS = "[ctypes.PyDLL(None).sleep(1000) for _ in range(1000)]"  # with the interpreter to itself
HEARS_AND_HANGS = "await heard.wait(); ctypes.PyDLL(None).sleep(1000)"
GOES_ON = "await heard.wait(); await asyncio.sleep(0.5)"


@contextmanager
def started(block: str) -> Iterator[subprocess.Popen[str]]:
    """The process, which does not outlive the test."""
    command = [sys.executable, "-c", PROGRAM.format(block=block)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env={"PYTHONPATH": ":".join(sys.path)}, text=True, start_new_session=True
    )
    try:
        assert process.stdout and process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("block", [HANGS, HEARS_AND_HANGS])
def test_who_hangs_is_killed(block: str, number: signal.Signals) -> None:
    with started(block) as process:
        began_s = time.monotonic()
        process.send_signal(number)
        assert process.wait(WAIT_S) == -signal.SIGKILL
        assert time.monotonic() - began_s >= WITHIN_S


@pytest.mark.parametrize("number", SIGNALS)
def test_who_ends_in_time_is_not(number: signal.Signals) -> None:
    with started(ENDS) as process:
        process.send_signal(number)
        assert process.communicate(timeout=WAIT_S)[0] == "heard\nended\n"
        assert process.returncode == 0


def test_a_thousand_more_signals_harm_nobody() -> None:
    with started(GOES_ON) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout and process.stdout.readline() == "heard\n"
        for _ in range(1000):
            process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=WAIT_S)[0].endswith("ended\n")
        assert process.returncode == 0


def test_who_is_told_nothing_runs_on() -> None:
    with started("await asyncio.sleep(0.1)") as process:
        assert process.communicate(timeout=WAIT_S)[0] == "ended\n"


def test_without_a_shell_signals_are_heard_still() -> None:
    program = PROGRAM.replace(
        "async def main", "import subprocess\ndef none(*a, **k): raise OSError\nsubprocess.Popen = none\nasync def main"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program.format(block=ENDS)],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
        text=True,
    )
    with process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=WAIT_S)[0] == "heard\nended\n"


def test_a_terminal_that_closes_ends_nothing_under_nohup() -> None:
    ignores = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    command = [sys.executable, "-c", ignores + PROGRAM.format(block=ENDS)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={"PYTHONPATH": ":".join(sys.path)}, text=True, start_new_session=True
    ) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)  # it would have ended
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=WAIT_S)[0] == "heard\nended\n"
