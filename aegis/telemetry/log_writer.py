"""Standard output and error that keep nobody waiting: a reader that stalls costs lines, never the server.

A pipe or a terminal is written to without blocking, by a file description of its own, so that other processes that have
it are not changed. Lines that do not fit wait in memory, up to a bound, for a thread that writes when there is room;
lines beyond that are dropped and counted. If the pipe or terminal is another user's, it cannot be opened again: then
the thread writes all lines, because any write may block. A file on a disk is written to as usual; while the disk is
full, lines wait like those that a reader does not take.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import socket
import stat
import time
from collections import deque
from collections.abc import Callable
from threading import Condition, Thread
from typing import TextIO

WAITING_BYTES_MAX = 1 << 20
_AGAIN_MS = 1000
_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_S = 1.0  # from one look at a full disk to the next
_LINGER_S = 10.0
"""So long a thread that writes all lines waits for the next one."""


class LogWriter(io.TextIOBase):
    """Writes to a stream that has a file, and keeps nobody waiting for that. Threads may share it."""

    def __init__(self, stream: TextIO, dropped_line: Callable[[int], str]) -> None:
        """`dropped_line` is the line for so many that were dropped. Raises OSError if the stream has no file."""
        self.dropped_line = dropped_line
        self.dropped = 0
        self._stream = stream
        self._file = _unblocked(stream.fileno())
        self._may_block = self._file == stream.fileno() and _is_pipe_or_terminal(self._file)
        self._socket = _socket_of(self._file)
        self._dropped_reported = 0
        self._is_cut = False  # the rest of a line that was dropped is dropped, too
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._changed = Condition()
        self._writing = False
        self._disk_is_full = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def flush(self) -> None:
        """Sends written lines as far as possible without waiting."""

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "replace")
        with self._changed:
            if not self._waiting and not self._may_block:
                data = data[self._write(data) :]
            if data:
                self._wait(data)
        return len(text)

    def finish(self, within_s: float) -> None:
        """Gives what waits so long to be written."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, within_s)

    def _wait(self, data: bytes) -> None:
        if self._is_cut or self._waiting_bytes + len(data) > WAITING_BYTES_MAX:
            self.dropped += data.count(b"\n")
            self._is_cut = not data.endswith(b"\n")
            return
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if self._may_block:
            self._changed.notify_all()
        if not self._writing:
            self._writing = True
            Thread(target=self._write_waiting, name="log", daemon=True).start()

    def _write_waiting(self) -> None:
        poll = select.poll()
        poll.register(self._file, select.POLLOUT)
        while True:
            poll.poll(_AGAIN_MS)
            while written := self._write(self._waiting[0][: select.PIPE_BUF]):  # not locked: this may block
                with self._changed:
                    self._written(written)
                    if not self._waiting:
                        self._changed.notify_all()
                        if self._may_block:
                            self._changed.wait_for(lambda: self._waiting, _LINGER_S)
                        if not self._waiting:
                            self._writing = False
                            return
            if self._disk_is_full:  # which no poll tells of
                time.sleep(_FULL_S)

    def _written(self, nbytes: int) -> None:
        self._waiting_bytes -= nbytes
        self._waiting[0] = self._waiting[0][nbytes:]
        if not self._waiting[0]:
            self._waiting.popleft()
        self._report_dropped()

    def _report_dropped(self) -> None:
        """Behind what waits, which came before."""
        if self.dropped > self._dropped_reported and self._waiting_bytes < WAITING_BYTES_MAX // 2:
            line = self.dropped_line(self.dropped - self._dropped_reported).encode()
            self._dropped_reported = self.dropped
            self._waiting.append(line)
            self._waiting_bytes += len(line)

    def _write(self, data: bytes) -> int:
        """The number of bytes that there was room for. If there is no reader any more, all count as written."""
        self._disk_is_full = False
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT) if self._socket else os.write(self._file, data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._disk_is_full = error.errno in _FULL
            return 0 if self._disk_is_full else len(data)


def _unblocked(file: int) -> int:
    """A file description of its own that does not block. Where it cannot be had, the one there is."""
    if _is_pipe_or_terminal(file):
        with contextlib.suppress(OSError):
            return os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    return file


def _is_pipe_or_terminal(file: int) -> bool:
    kind = os.fstat(file).st_mode
    return stat.S_ISFIFO(kind) or stat.S_ISCHR(kind)


def _socket_of(file: int) -> socket.socket | None:
    """The socket behind the file, if it is one: services of systemd write to such."""
    return socket.socket(fileno=os.dup(file)) if stat.S_ISSOCK(os.fstat(file).st_mode) else None
