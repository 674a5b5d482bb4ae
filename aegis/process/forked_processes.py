"""The client of a fork server (`fork_server`): children that start at once, because what they need is imported."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

import msgspec

from aegis.process.child import follow_launcher
from aegis.process.fork_server import MESSAGE_BYTES, Answer, Ended, NotStarted, Prepare, Start, Started

START_S = 180.0
"""Until a start is answered: the first one waits until all is imported."""

_CODE_S = 1.0
"""Until the server says with which code a child ended."""

_UNKNOWN_CODE = 255


class ForkedProcess:
    """Running, or ended: then it has a return code, which is negative for a signal."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = descriptor
        self._ended = asyncio.Event()

    def kill(self) -> None:
        """Does nothing if it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def end(self, code: int) -> None:
        """Notes that the process has ended. Does nothing the second time."""
        if self.returncode is None:
            self.returncode = code
            os.close(self._descriptor)
            self._ended.set()

    @property
    def descriptor(self) -> int:
        """Readable once it has ended (pidfd_open(2))."""
        return self._descriptor


class ForkServer:
    """A fork server, and its children. If it ends, or does not answer, they are killed, and the next start makes
    another one. The end of a child is seen here, whatever the server does."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the server, which begins to import `modules` at once. Raises OSError."""
        self._modules = modules
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._children: dict[int, ForkedProcess] = {}
        self._starting = deque[asyncio.Future[ForkedProcess]]()
        self._turn = asyncio.Lock()
        self._launch()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str],
        stdin: bytes,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> ForkedProcess:
        """Runs `module` as `python -m` would, with `stdin` to read. `environment` adds to the server's own. Standard
        output and error are the descriptors that are given, or else this process's. Raises OSError."""
        async with self._turn:  # until it has imported all, many messages might not fit its socket
            outputs = [1 if stdout is None else stdout, 2 if stderr is None else stderr]
            started = self._ask(module, arguments, environment, stdin, outputs)
            try:
                async with asyncio.timeout(START_S):
                    return await asyncio.shield(started)
            except (TimeoutError, asyncio.CancelledError) as error:
                started.add_done_callback(_kill_unwanted)
                if isinstance(error, TimeoutError):
                    self._lose()
                raise

    def prepare(self, function: str, data: bytes) -> None:
        """Has it call `MODULE:NAME` with the bytes, so that children started later have what that makes. They may be
        without, as where it fails, too many files are open here, or the server has been made anew since."""
        if self._socket is None:
            return
        with contextlib.suppress(OSError), _file("prepare", data) as file:
            socket.send_fds(self._socket, [msgspec.json.encode(Prepare(function))], [file.fileno()])

    def close(self) -> None:
        """Ends it, and any child that is left."""
        self._lose()

    def _ask(
        self, module: str, arguments: tuple[str, ...], environment: Mapping[str, str], stdin: bytes, outputs: list[int]
    ) -> asyncio.Future[ForkedProcess]:
        if self._process is None or self._process.poll() is not None:
            self._lose()
            self._launch()
        client = self._heeded()
        changed = {name: value for name, value in environment.items() if self._environment.get(name) != value}
        message = msgspec.json.encode(Start(module, arguments, changed))
        with _file("stdin", stdin) as file:
            socket.send_fds(client, [message], [file.fileno(), *outputs])
        started: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        self._starting.append(started)
        return started

    def _launch(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "aegis.process.fork_server", str(fd), *self._modules],
                stdin=subprocess.DEVNULL,
                pass_fds=[fd],
                env=self._environment,
                preexec_fn=follow_launcher,
            )
        self._socket = ours

    def _heeded(self) -> socket.socket:
        """The socket, of which the running loop reads."""
        assert self._socket
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            loop.add_reader(self._socket, self._receive)
            self._loop = loop
        return self._socket

    def _receive(self) -> None:
        assert self._socket
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1)
        except BlockingIOError:
            return
        except ConnectionError:
            data, fds = b"", []
        if not data:
            self._lose()
            return
        match msgspec.json.decode(data, type=Answer):
            case Started(pid) if not fds:  # it could not be received: too many files are open here
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self._starting.popleft().set_exception(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
            case Started(pid):
                child = self._children[pid] = ForkedProcess(pid, fds[0])
                asyncio.get_running_loop().add_reader(child.descriptor, self._seen_ended, child)
                self._starting.popleft().set_result(child)
            case NotStarted(number):
                self._starting.popleft().set_exception(OSError(number, os.strerror(number)))
            case Ended(pid, code) if pid in self._children:
                self._end(self._children.pop(pid), code)

    def _lose(self) -> None:
        """Ends the server, whose end kills its children."""
        if self._loop and self._socket and not self._loop.is_closed():
            self._loop.remove_reader(self._socket)
        if self._process:
            self._process.kill()
            self._process.wait()
        if self._socket:
            self._socket.close()
        for started in self._starting:
            started.set_exception(ConnectionResetError("the process that starts others ended"))
        self._starting.clear()
        self._children.clear()
        self._process = self._socket = self._loop = None

    def _seen_ended(self, child: ForkedProcess) -> None:
        """The server says the code at once, unless it stands still, or has ended and the child with it."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(child.descriptor)
        if child.pid in self._children:
            loop.call_later(_CODE_S, self._end_untold, child)
        else:
            self._end_untold(child)

    def _end_untold(self, child: ForkedProcess) -> None:
        child.end(_UNKNOWN_CODE if child.pid in self._children else -signal.SIGKILL)

    def _end(self, child: ForkedProcess, code: int) -> None:
        if child.returncode is None:
            asyncio.get_running_loop().remove_reader(child.descriptor)
            child.end(code)


@contextlib.contextmanager
def _file(name: str, data: bytes) -> Iterator[BinaryIO]:
    """A file in memory that holds the data, to be read from its beginning."""
    with os.fdopen(os.memfd_create(name), "r+b") as file:
        file.write(data)
        file.seek(0)
        yield file


def _kill_unwanted(started: asyncio.Future[ForkedProcess]) -> None:
    if not started.cancelled() and started.exception() is None:
        started.result().kill()
