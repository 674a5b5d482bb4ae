"""Memory of the node that several processes map: weight images, host slabs of KV."""

from __future__ import annotations

import fcntl
import os

from aegis.core.errors import UserError
from aegis.device.cpu.libc import map_file, release

_POPULATE_BYTES = 16 << 20
"""Faulted in at a time: the process's other threads can map nothing meanwhile (200 ms for a GiB)."""


class SharedMemory:
    """An unnamed file in memory, of fixed size, zero at first. Any process of the same user can map it by `path`.

    The memory lives as long as this object or a mapping of it; nothing is left behind when processes die.
    """

    __slots__ = ("_fd", "nbytes", "path")

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = fd
        self.nbytes = nbytes
        self.path = f"/proc/{os.getpid()}/fd/{fd}"

    @classmethod
    def create(cls, nbytes: int, name: str) -> SharedMemory:
        """`name` shows up in /proc/<pid>/maps, nothing else. No memory is taken before it is written."""
        fd = os.memfd_create(f"aegis-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        # Shrinking it would kill every process that has it mapped.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(fd, nbytes)

    def close(self) -> None:
        os.close(self._fd)


class MappedFile:
    """A file or shared memory mapped whole: the HostRegion of both devices."""

    __slots__ = ("base", "nbytes")

    def __init__(self, path: str, *, writable: bool, populate: bool) -> None:
        """Raises UserError if there is nothing to map."""
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
            try:
                self._map(fd, path, writable, populate)
            finally:
                os.close(fd)
        except OSError as error:
            raise UserError(f"cannot map {path}: {error.strerror}") from error

    def _map(self, fd: int, path: str, writable: bool, populate: bool) -> None:
        self.nbytes = os.fstat(fd).st_size
        if self.nbytes == 0:
            raise UserError(f"cannot map {path}: it is empty")
        self.base = map_file(fd, self.nbytes, writable=writable, populate=False)
        for at in range(0, self.nbytes if populate else 0, _POPULATE_BYTES):
            count = min(_POPULATE_BYTES, self.nbytes - at)
            map_file(fd, count, offset=at, address=self.base + at, writable=writable)

    def close(self) -> None:
        """Unmaps it; a second call does nothing."""
        if self.base:
            release(self.base, self.nbytes)
            self.base = 0
