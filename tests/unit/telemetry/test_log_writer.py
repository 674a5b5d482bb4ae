"""A log without a reader keeps nothing waiting, and says how many lines were lost."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from aegis.telemetry import log_writer
from aegis.telemetry.log_writer import WAITING_BYTES_MAX, LogWriter

WAIT_S = 10.0
LINE = "x" * 99 + "\n"
MANY = 4 * WAITING_BYTES_MAX // len(LINE)


def dropped_line(lines: int) -> str:
    return f"lost {lines}\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        yield reading, stream
    os.close(reading)


def read_until(reading: int, end: bytes) -> bytes:
    """In a thread, for a test that would wait for ever is to fail."""
    read = b""

    def work() -> None:
        nonlocal read
        while end not in read:
            read += os.read(reading, 1 << 16)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), read[-200:]
    return read


def test_what_is_read_comes_as_it_was_written(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    writer = LogWriter(stream, dropped_line)
    for number in range(100):
        writer.write(f"{number} é\n")
    writer.write("end\n")
    assert read_until(reading, b"end\n").decode() == "".join(f"{number} é\n" for number in range(100)) + "end\n"
    assert writer.dropped == 0


def test_of_what_is_not_read_some_waits_and_the_rest_is_counted_and_told(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    writer = LogWriter(stream, dropped_line)
    for _ in range(MANY):
        writer.write(LINE)
    assert MANY * 0.5 < writer.dropped < MANY
    dropped = writer.dropped
    read = read_until(reading, f"lost {dropped}\n".encode()).decode()
    lines = read.splitlines(keepends=True)
    assert lines[-1] == dropped_line(dropped)
    assert lines[:-1] == [LINE] * (MANY - dropped), "none is cut, none is lost besides"
    writer.write("again\n")
    assert b"again\n" in read_until(reading, b"again\n")


def test_a_line_that_came_in_pieces_is_lost_as_a_whole(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    writer = LogWriter(stream, dropped_line)
    while not writer.dropped:
        writer.write(LINE)
    for piece in (LINE[:-1], "z", "z\n"):  # the last of which there would be room for
        writer.write(piece)
    assert b"z" not in read_until(reading, dropped_line(writer.dropped).encode())


def test_others_who_have_the_pipe_are_not_changed(pipe: tuple[int, TextIO]) -> None:
    _, stream = pipe
    LogWriter(stream, dropped_line)
    assert os.get_blocking(stream.fileno())


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pipe is another user's, who alone may open it again."""

    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.usefixtures("foreign")
def test_a_pipe_of_another_user_that_is_not_read_keeps_nobody_waiting(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    writer = LogWriter(stream, dropped_line)

    def work() -> None:
        for _ in range(MANY):
            writer.write(LINE)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    stuck = thread.is_alive()
    read = read_until(reading, b"lost ").decode()
    assert not stuck, "no write waited"
    assert writer.dropped
    assert set(read.splitlines(keepends=True)[:-1]) == {LINE}
    assert os.get_blocking(stream.fileno())


@pytest.mark.usefixtures("foreign")
def test_lines_to_a_pipe_of_another_user_come_in_order_and_finishing_waits_for_them(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    writer = LogWriter(stream, dropped_line)
    for number in range(3):
        writer.write(f"{number}\n")
    writer.finish(WAIT_S)
    assert os.read(reading, 100) == b"0\n1\n2\n"
    writer.write("3\n")
    began_s = time.monotonic()
    assert os.read(reading, 100) == b"3\n"
    assert time.monotonic() - began_s < 1.0
    assert sum(each.name == "log" for each in threading.enumerate()) >= 1


def test_a_reader_who_is_gone_ends_nothing(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    writer = LogWriter(stream, dropped_line)
    other = os.dup(reading)
    os.close(other)
    os.dup2(os.open(os.devnull, os.O_RDONLY), reading)
    for _ in range(3):
        writer.write(LINE)
    writer.finish(WAIT_S)


def test_a_file_is_written_where_it_was(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        stream.write("before\n")
        stream.flush()
        LogWriter(stream, dropped_line).write("after\n")
    assert (tmp_path / "log").read_text() == "before\nafter\n"


def test_lines_wait_while_the_disk_is_full_and_those_beyond_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, room, tries = os.write, 30, 0

    def into_the_room(file: int, data: bytes) -> int:
        nonlocal room, tries
        written = min(room, len(data))
        room, tries = room - written, tries + 1
        if not written:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:written])

    monkeypatch.setattr(os, "write", into_the_room)
    monkeypatch.setattr(log_writer, "_FULL_S", 0.05)
    with (tmp_path / "log").open("w") as stream:
        writer = LogWriter(stream, dropped_line)
        for _ in range(MANY):
            writer.write(LINE)
        assert MANY * 0.5 < writer.dropped < MANY
        before = tries
        time.sleep(0.5)
        assert tries - before < 20, "a full disk is not asked all the time"
        room = 2 * len(LINE) * MANY
        writer.finish(WAIT_S)
        lines = (tmp_path / "log").read_text().splitlines(keepends=True)
        assert lines == [LINE] * (MANY - writer.dropped) + [dropped_line(writer.dropped)]


def test_a_socket_that_is_not_read_keeps_nobody_waiting() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, os.fdopen(os.dup(theirs.fileno()), "w") as stream:
        writer = LogWriter(stream, dropped_line)
        for _ in range(MANY):
            writer.write(LINE)
        assert writer.dropped
        assert read_until(ours.fileno(), f"lost {writer.dropped}\n".encode()).startswith(LINE.encode())


def test_finishing_waits_so_long_and_no_longer(pipe: tuple[int, TextIO]) -> None:
    _, stream = pipe
    writer = LogWriter(stream, dropped_line)
    for _ in range(MANY):
        writer.write(LINE)
    writer.finish(0.01)
