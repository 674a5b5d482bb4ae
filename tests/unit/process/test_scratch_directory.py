"""A directory that is gone when its process is, however that ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from aegis.process.scratch_directory import scratch
from tests.live.server import eventually

GONE_S = 10.0

HOLDER = """
from aegis.process.scratch_directory import scratch
with scratch("held-") as directory:
    (directory / "socket").touch()
    print(directory, flush=True)
    input()
"""


def test_it_is_gone_on_leaving() -> None:
    with scratch("left-") as directory:
        (directory / "within").mkdir()
        (directory / "within" / "file").touch()
        assert directory.name.startswith("left-")
    assert not directory.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGTERM])
def test_it_is_gone_when_its_process_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    command, environment = [sys.executable, "-c", HOLDER], {"PYTHONPATH": ":".join(sys.path), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as holder:
        assert holder.stdout
        directory = Path(holder.stdout.readline().strip())
        assert (directory / "socket").exists() and directory.parent == tmp_path
        holder.send_signal(number)
        assert holder.wait(GONE_S) == -number
    eventually(lambda: not directory.exists(), "the directory is gone", GONE_S)


def test_what_nobody_removed_the_next_one_does_and_leaves_what_is_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned, older, elsewhere = tmp_path / "aegis-abandoned", tmp_path / "aegis-older", tmp_path / "elsewhere"
    for directory in (abandoned, older, elsewhere):
        directory.mkdir()
    for directory in (abandoned, elsewhere):
        (directory / ".owner").touch()
    (tmp_path / "aegis-link").symlink_to(elsewhere)
    with scratch("aegis-") as living:
        assert not abandoned.exists()
        with scratch("aegis-"):
            assert living.exists(), "its owner lives"
        assert older.exists(), "nobody can tell whether its owner does"
        assert (elsewhere / ".owner").exists()
    assert not living.exists()
