"""Words of 8 bytes that several processes see: the timeline semaphores behind `EventHandle`.

A word only grows, and has one writer: the stream whose progress it tells. An event is passed once its word has reached
its value, so one word serves any number of events and none has to be created or destroyed. Aligned 8-byte stores are
atomic; x86 keeps them behind the copies they announce, elsewhere the interpreter lock taken in between does.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import sys
import time

from aegis.device.cpu.libc import futex_wait, futex_wake

POISON = (1 << 63) - 1
WORD_BYTES = 8
_LOW_32 = (1 << 32) - 1

assert sys.byteorder == "little", "waiting looks at the first four bytes of a word"


class SharedWords:
    """`count` words, all 0 at first. The object that created them must outlive the opening by others, not the use."""

    __slots__ = ("_base", "_fd", "_map", "_words", "count", "path")

    def __init__(self, fd: int, path: str) -> None:
        self.path = path
        self._fd = fd
        self._map = mmap.mmap(fd, 0)
        self.count = len(self._map) // WORD_BYTES
        self._words = (ctypes.c_uint64 * self.count).from_buffer(self._map)
        self._base = ctypes.addressof(self._words)

    @classmethod
    def create(cls, count: int) -> SharedWords:
        fd = os.memfd_create("aegis-words", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, count * WORD_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(fd, f"/proc/{os.getpid()}/fd/{fd}")

    @classmethod
    def open(cls, path: str) -> SharedWords:
        """From any process of the same user, by the creator's `path`. Raises OSError when the creator is gone."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), path)

    @property
    def base(self) -> int:
        """Address of word 0."""
        return self._base

    def load(self, word: int) -> int:
        return self._words[word]

    def store(self, word: int, value: int) -> None:
        """Stores and wakes every waiter of the word."""
        self._words[word] = value
        futex_wake(self._base + word * WORD_BYTES)

    def poison(self, word: int) -> None:
        """Passes every event of this word, past and future: for the words of a process that is no more."""
        self.store(word, POISON)

    def wait(self, word: int, value: int, *, timeout_ns: int) -> bool:
        """Sleeps until the word has reached `value`; False if it has not after `timeout_ns`."""
        deadline_ns = time.monotonic_ns() + timeout_ns
        while (seen := self._words[word]) < value:
            left_ns = deadline_ns - time.monotonic_ns()
            if left_ns <= 0:
                return False
            futex_wait(self._base + word * WORD_BYTES, seen & _LOW_32, left_ns)
        return True

    def close(self) -> None:
        """Unmaps the words; any later use is a bug."""
        del self._words
        self._map.close()
        os.close(self._fd)
