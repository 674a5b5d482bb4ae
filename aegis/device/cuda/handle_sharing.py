"""Handles of physical GPU memory from the process that made them to those that map them.

A handle travels as a file descriptor (cuMemExportToShareableHandle) over a Unix socket (SCM_RIGHTS). A process that
connects is told the pool's measures and then asks for runs of pages; each answer carries the descriptors of one run.
The socket has a name but no file (Linux's abstract names), so nothing is left behind by an owner that is killed;
whoever connects must be of the owner's user.
"""

from __future__ import annotations

import array
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import Event, Thread

from msgspec import Struct

from aegis.core.errors import UserError
from aegis.core.ids import PageRun

BATCH = 128
"""Descriptors per message. The kernel takes 253; a process may hold 1024 by default."""

_BREATH_S = 0.1
_MEASURES = struct.Struct("<QQQ")
_RUN = struct.Struct("<QQ")

Export = Callable[[PageRun], Sequence[int]]


class Measures(Struct, frozen=True):
    """The sizes of a pool that a process has to know before it maps anything."""

    ordinal: int
    page_bytes: int
    page_count: int


class HandleServer:
    """Gives descriptors to processes that connect; `export` makes those of a run, which are closed once they are
    sent."""

    def __init__(self, measures: Measures, export: Export) -> None:
        self._greeting = _MEASURES.pack(measures.ordinal, measures.page_bytes, measures.page_count)
        self._export = export
        self._closed = Event()
        self.address = f"aegis-gpu-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen()
        Thread(target=self._accept, name="gpu handles", daemon=True).start()

    def close(self) -> None:
        """No process can connect any more; connected ones are served on."""
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                peer, _ = self._listener.accept()
            except OSError:  # the listener was closed, or there are no descriptors left
                self._closed.wait(_BREATH_S)
                continue
            Thread(target=self._serve, args=(peer,), name="gpu handles of a process", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, suppress(OSError):  # the peer is gone
            if _user_of(peer) != os.getuid():
                return
            peer.sendall(self._greeting)
            while asked := peer.recv(_RUN.size):
                fds = self._export(PageRun(*_RUN.unpack(asked)))
                try:
                    socket.send_fds(peer, [b"\1"], list(fds))
                finally:
                    for fd in fds:
                        os.close(fd)


class HandleClient:
    """A process's connection to a pool. Used by one thread at a time.

    Raises UserError if no process serves `address`.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.connect(f"\0{address}")
            greeting = self._socket.recv(_MEASURES.size)
        except OSError as error:
            self._socket.close()
            raise UserError(f"the GPU's memory pool {address} cannot be reached: {error.strerror}") from error
        if not greeting:
            self._socket.close()
            raise UserError(f"the GPU's memory pool {address} is another user's")
        self.measures = Measures(*_MEASURES.unpack(greeting))

    def fetch(self, run: PageRun) -> Iterator[list[int]]:
        """Descriptors of the run's pages in order, a batch at a time; each is the caller's to close.

        Raises OSError if the owner is gone.
        """
        for start in range(run.start, run.stop, BATCH):
            count = min(BATCH, run.stop - start)
            self._socket.sendall(_RUN.pack(start, start + count))
            yield self._receive(count)

    def close(self) -> None:
        self._socket.close()

    def _receive(self, count: int) -> list[int]:
        room = socket.CMSG_LEN(count * array.array("i").itemsize)
        message, ancillary, _, _ = self._socket.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for _, _, payload in ancillary:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
        if not message or len(fds) != count:
            for fd in fds:
                os.close(fd)
            raise OSError(f"the GPU's memory pool gave {len(fds)} of {count} handles")
        return fds.tolist()


def _user_of(peer: socket.socket) -> int:
    """The user whose process connected (SO_PEERCRED: pid, uid, gid)."""
    credentials = struct.Struct("3i")
    _, user, _ = credentials.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return int(user)
