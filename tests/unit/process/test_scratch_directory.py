"""A directory that is gone when its process is, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def held(parent: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """By another process, which is ended by whoever asks."""
    command, environment = [sys.executable, "-c", HOLDER], {"PYTHONPATH": ":".join(sys.path), "TMPDIR": str(parent)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as holder:
        assert holder.stdout
        directory = Path(holder.stdout.readline().strip())
        assert (directory / "socket").exists() and directory.parent == parent
        yield holder, directory


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGTERM])
def test_it_is_gone_when_its_process_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    with held(tmp_path) as (holder, directory):
        holder.send_signal(number)
        assert holder.wait(GONE_S) == -number
    eventually(lambda: not directory.exists(), "the directory is gone", GONE_S)


def test_it_is_gone_when_its_process_ends_and_its_children_with_it(tmp_path: Path) -> None:
    """As a worker of Ray's does, without a word to Python."""
    with held(tmp_path) as (holder, directory):
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        for pid in children:
            os.kill(int(pid), signal.SIGKILL)
        holder.kill()
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
