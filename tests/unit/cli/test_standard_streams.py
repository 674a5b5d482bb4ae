"""Commands whose input or output is closed, or has another encoding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHOWING = """
import os, sys
from aegis.cli.standard_streams import prepare_streams
prepare_streams()
for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
    assert (stream.fileno(), os.get_inheritable(number)) == (number, True), number
assert not os.isatty(1)
print("to nobody")
print("to nobody", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("closing", ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_lead_to_nowhere(closing: str) -> None:
    shell = ["sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, "-c", SHOWING]
    done = subprocess.run(shell, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (7, False), done.stderr


def test_characters_that_an_encoding_lacks_are_spelled() -> None:
    """As those of a terminal of another locale, or bytes in the name of a file."""
    printing = 'from aegis.cli.standard_streams import prepare_streams as p; p(); print("a … \\udcff")'
    for encoding, told in (("latin-1", rb"a \u2026 \udcff"), ("utf-8", "a … \\udcff".encode())):
        environment = os.environ | {"PYTHONIOENCODING": encoding}
        done = subprocess.run([sys.executable, "-c", printing], env=environment, capture_output=True)
        assert (done.stdout.strip(), done.returncode) == (told, 0), done.stderr
    help_text = [sys.executable, "-m", "aegis.cli", "launch", "--help"]
    done = subprocess.run(help_text, env=os.environ | {"PYTHONIOENCODING": "latin-1"}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_command_opens_them(tmp_path: Path) -> None:
    (result := tmp_path / "a.json").write_text('{"completed": 1, "duration": 2.0, "num_prompts": 1}')
    command = [sys.executable, "-m", "aegis.cli", "bench", "compare", result, result]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
