"""Ends this process some time after SIGINT, SIGTERM or SIGHUP, whatever it does then.

A thread may keep the interpreter to itself, or the main one may hang: then no Python code runs that could end anything.
The handler of `faulthandler`, which is C and waits for nothing, still runs. It writes to a pipe that a shell reads, and
the shell kills.
"""

from __future__ import annotations

import asyncio
import faulthandler
import math
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# The input ends with this process; if it does in time, nothing is killed. `timeout` exits with 124 when time is up,
# that of busybox with 143.
_KILL = 'read -r _ || exit; timeout "$0" cat >/dev/null; case $? in 124 | 143) kill -KILL "$PPID" ;; esac'
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def on_signals(do: Callable[[], None], shell: int | None) -> None:
    """The running loop calls `do` at each of them, and the shell is told first. To be called again after whatever else
    may have handled them. SIGHUP, of a terminal that closes, stays ignored where it was: under `nohup`."""

    def heard(number: signal.Signals) -> None:
        faulthandler.unregister(number)  # its handler interrupts itself: hundreds of signals take all of the stack
        do()

    for number in _heeded():
        faulthandler.unregister(number)
        asyncio.get_running_loop().add_signal_handler(number, heard, number)
        if shell is not None:
            faulthandler.register(number, shell, all_threads=False, chain=True)


def _heeded() -> Iterator[signal.Signals]:
    for number in _SIGNALS:
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            yield number


@contextmanager
def killed_after_signal(within_s: float) -> Iterator[int | None]:
    """The pipe by which `on_signals` tells the shell. None if no shell can be started; then nothing kills the
    process."""
    try:
        shell = subprocess.Popen(
            ["/bin/sh", "-c", _KILL, str(math.ceil(within_s))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.defpath},
            process_group=0,  # Ctrl-C in a terminal is not for it
        )
    except OSError:
        yield None
        return
    with shell:
        assert shell.stdin is not None
        os.set_blocking(shell.stdin.fileno(), False)  # signals by the hundred are not waited for
        try:
            yield shell.stdin.fileno()
        finally:
            for number in _SIGNALS:
                faulthandler.unregister(number)
