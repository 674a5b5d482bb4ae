"""Ctrl-C at the command line, in processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from aegis import __version__
from aegis.cli.interrupt import ended_by_interrupt

AT_AN_IMPORT = """
import runpy, signal, sys
wanted, entry, *sys.argv = sys.argv[1:]

class Interrupting:
    def find_spec(self, name, *_):
        if name == wanted:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
if entry == "module":
    runpy.run_module("aegis.cli.main", run_name="__main__")
else:
    from aegis.cli.main import main
    main()
"""

BUILDING = """
import signal, sys, typer.main
from aegis.cli.main import main
typer.main.get_command = lambda app: signal.raise_signal(signal.SIGINT)
main()
"""

LOSING_IT = """
import signal, sys
import aegis.cli.doctor
from aegis.cli.main import main

def lose(file):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        pass
    return [aegis.cli.doctor.Finding("torch", "is here")]

aegis.cli.doctor.examined = lose
sys.argv = ["aegis", "doctor"]
main()
"""


def ended(code: str, *arguments: str, ignoring: bool = False) -> tuple[int, str, str]:
    """The exit code and the output of Python, which handles SIGINT only if it is not started with it ignored."""
    handler = signal.SIG_IGN if ignoring else signal.SIG_DFL
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("module", ["aegis.cli.commands", "typer", "bench.simulate.command"])
@pytest.mark.parametrize("entry", ["module", "script"])
def test_it_ends_the_imports_quietly(entry: str, module: str) -> None:
    assert ended(AT_AN_IMPORT, module, entry, "aegis", "--version") == (130, "", "")


def test_it_ends_the_building_of_commands_quietly() -> None:
    assert ended(BUILDING) == (130, "", "")


def test_a_process_that_ignores_it_goes_on() -> None:
    version = f"aegis {__version__}\n"
    assert ended(AT_AN_IMPORT, "typer", "script", "aegis", "--version", ignoring=True) == (0, version, "")


def test_it_ends_doctor_also_where_an_import_would_lose_it() -> None:
    assert ended(LOSING_IT) == (130, "", "")


def test_python_handles_it_again_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    with ended_by_interrupt():
        pass
    assert signal.getsignal(signal.SIGINT) is before


def test_other_handlers_and_threads_are_left_alone() -> None:
    def other(*_: Any) -> None:
        """Somebody else's."""

    before = signal.signal(signal.SIGINT, other)
    try:
        with ended_by_interrupt():
            assert signal.getsignal(signal.SIGINT) is other
    finally:
        signal.signal(signal.SIGINT, before)
    done: list[str] = []

    def elsewhere() -> None:
        with ended_by_interrupt():
            done.append("went on")

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert done == ["went on"]
