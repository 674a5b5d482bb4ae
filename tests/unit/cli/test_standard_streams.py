"""Commands whose input or output is closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SHOWING = """
import os, sys
from aegis.cli.standard_streams import open_closed_streams
open_closed_streams()
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


def test_the_command_opens_them(tmp_path: Path) -> None:
    (result := tmp_path / "a.json").write_text('{"completed": 1, "duration": 2.0, "num_prompts": 1}')
    command = [sys.executable, "-m", "aegis.cli", "bench", "compare", result, result]
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
