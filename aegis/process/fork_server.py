"""A process that imports what its children need once, and forks them: `python -m aegis.process.fork_server 3 MODULE…`.

It imports the modules, and of `MODULE:NAME` also what has that name in it, and then takes a `Start` at a time from the
socket whose descriptor it is told. A child that it forks is as `python -m` would have made it, but starts at once, and
shares the memory of what was imported, and of what a `Prepare` made since.

Only a process with one thread may be forked, and none that has opened a GPU. If what was imported did either, children
are made by fork and exec instead: they import it again.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec import Struct
from setproctitle import setproctitle

from aegis.process.child import follow_launcher
from aegis.process.openmp_threads import threads_of_process

MESSAGE_BYTES = 1 << 16
STREAMS = 3  # standard input, output and error, which come with a start


class Prepare(Struct, frozen=True, tag=True):
    """To call `MODULE:NAME` with the bytes in the file that comes with it, for children that are forked later. It may
    fail: a child that needs what it makes says what is wrong. Not answered."""

    function: str


class Start(Struct, frozen=True, tag=True):
    """To run `module` as a program. `environment` is what differs from the server's own."""

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]


class Started(Struct, frozen=True, tag=True):
    """The answer to a start; a descriptor of the process (pidfd_open(2)) comes with it."""

    pid: int


class NotStarted(Struct, frozen=True, tag=True):
    errno: int


class Ended(Struct, frozen=True, tag=True):
    """`code` is negative for a signal."""

    pid: int
    code: int


Asked = Prepare | Start
Answer = Started | NotStarted | Ended


class _Server:
    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self._selector = selectors.DefaultSelector()
        self._selector.register(client, selectors.EVENT_READ)
        self._may_fork = _is_untouched()

    def serve(self) -> Start | None:
        """Returns in each child with what it is to run, and in the server when its client is gone."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._client:
                    data, fds, _, _ = socket.recv_fds(self._client, MESSAGE_BYTES, STREAMS)
                    if not data:
                        return None
                    asked: Prepare | Start = msgspec.json.decode(data, type=Asked)
                    if isinstance(asked, Prepare):
                        self._prepare(fds, asked)
                    elif self._fork(fds, asked):
                        return asked
                else:
                    self._reap(key.fd, key.data)

    def _prepare(self, fds: Sequence[int], prepare: Prepare) -> None:
        (fd,) = fds
        with os.fdopen(fd, "rb") as file:
            data = file.read()
        if not self._may_fork:  # nobody would have it
            return
        with contextlib.suppress(Exception):
            module, _, name = prepare.function.partition(":")
            getattr(importlib.import_module(module), name)(data)
        gc.collect()
        gc.freeze()
        self._may_fork = _is_untouched()

    def _fork(self, fds: Sequence[int], start: Start) -> bool:
        """Whether this is the child."""
        try:
            pid = os.fork()
        except OSError as error:
            self._answer(NotStarted(error.errno or 0))
        else:
            if not pid:
                self._become(fds, start)
                return True
            process = os.pidfd_open(pid)
            self._selector.register(process, selectors.EVENT_READ, pid)
            self._answer(Started(pid), process)
        for fd in fds:
            os.close(fd)
        return False

    def _become(self, fds: Sequence[int], start: Start) -> None:
        follow_launcher()
        for stream, fd in enumerate(fds):
            os.dup2(fd, stream)
            os.close(fd)
        for key in self._selector.get_map().values():
            os.close(key.fd)
        self._client.detach()
        self._selector.close()
        os.environ.update(start.environment)
        if not self._may_fork:
            os.execv(sys.executable, _command(start))

    def _reap(self, process: int, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        self._selector.unregister(process)
        os.close(process)
        self._answer(Ended(pid, os.waitstatus_to_exitcode(status)))

    def _answer(self, answer: Answer, *fds: int) -> None:
        with contextlib.suppress(ConnectionError):  # its end is noticed at the next reading
            socket.send_fds(self._client, [msgspec.json.encode(answer)], fds)


def _is_untouched() -> bool:
    """Whether there is one thread and no driver of a GPU."""
    return len(list(Path("/proc/self/task").iterdir())) == 1 and "libcuda.so" not in Path("/proc/self/maps").read_text()


def _import(named: str) -> None:
    module, _, name = named.partition(":")
    imported = importlib.import_module(module)
    if name:
        getattr(imported, name)  # of a package that imports its parts when they are asked for


def _command(start: Start) -> list[str]:
    return [sys.executable, "-m", start.module, *start.arguments]


def _run(start: Start) -> NoReturn:
    """Runs the module as `python -m` would."""
    setproctitle(" ".join(_command(start)))  # for readers of the process list
    sys.argv[1:] = start.arguments
    if "OMP_NUM_THREADS" in os.environ and (torch := sys.modules.get("torch")):
        # the server has one, or had read its own number when it was imported
        torch.set_num_threads(threads_of_process(len(os.sched_getaffinity(0))))
    sys.modules.pop(start.module, None)  # it runs as the program, and again if it was imported as a module
    code = 1
    try:
        runpy.run_module(start.module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException:  # noqa: BLE001 - the interpreter's own last line of defence, as for any program
        traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    client = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    for module in sys.argv[2:]:
        with contextlib.suppress(Exception):  # a child that needs it says what is wrong
            _import(module)
    gc.freeze()  # so that a child's collector does not write to, and thereby copy, what is shared
    if start := _Server(client).serve():
        gc.enable()
        _run(start)


if __name__ == "__main__":
    main()
