"""The handful of C library calls the CPU device is made of, with errors raised as OSError.

These calls let other Python threads run meanwhile, all but `copy_small`: giving the interpreter lock up and getting it
back costs up to a whole switch interval (5 ms) beside a busy thread, far more than a small copy.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform

from aegis.core.errors import UserError

_PROT_NONE, _PROT_READ, _PROT_WRITE = 0, 1, 2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS = 0x01, 0x02, 0x10, 0x20
_MAP_NORESERVE, _MAP_POPULATE = 0x4000, 0x8000
_MADV_POPULATE_READ = 22
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}
_EVERYBODY = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_libc.memset.restype = ctypes.c_void_p
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memcpy.restype = ctypes.c_void_p
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.POINTER(_Timespec),
    ctypes.c_void_p,
    ctypes.c_uint32,
)
_everything = memoryview((ctypes.c_char * ((1 << 48) - 1)).from_address(0)).cast("B")  # by address
_FAILED = ctypes.c_void_p(-1).value


def _futex_number() -> int:
    if platform.system() != "Linux" or platform.machine() not in _SYS_FUTEX:
        raise UserError(f"the CPU device needs Linux on one of {', '.join(_SYS_FUTEX)}, this is {platform.platform()}")
    return _SYS_FUTEX[platform.machine()]


_FUTEX = _futex_number()


def _check(failed: int, what: str) -> None:
    if failed:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    got = _libc.mmap(address, nbytes, protection, flags, fd, offset)
    _check(got == _FAILED, f"mmap of {nbytes} bytes")
    return int(got)


def reserve(nbytes: int, address: int | None = None) -> int:
    """Address space without memory: touching it is SIGSEGV. At `address` it replaces what is mapped there."""
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | (_MAP_FIXED if address is not None else 0)
    return _mmap(address, nbytes, _PROT_NONE, flags, -1, 0)


def map_file(
    fd: int, nbytes: int, *, offset: int = 0, address: int | None = None, writable: bool = True, populate: bool = True
) -> int:
    """Shared mapping of `[offset, offset + nbytes)` of a file. At `address` it replaces what is mapped there."""
    protection = _PROT_READ | (_PROT_WRITE if writable else 0)
    flags = _MAP_SHARED | (_MAP_POPULATE if populate else 0) | (_MAP_FIXED if address is not None else 0)
    return _mmap(address, nbytes, protection, flags, fd, offset)


def reserve_file(fd: int, nbytes: int, address: int) -> None:
    """Shared mapping of the first bytes of a file at `address`, without access until `protect` gives it."""
    _mmap(address, nbytes, _PROT_NONE, _MAP_SHARED | _MAP_FIXED | _MAP_NORESERVE, fd, 0)


def protect(address: int, nbytes: int, *, access: bool) -> None:
    """Gives or takes access to what is mapped there. The page table stays filled."""
    _check(_libc.mprotect(address, nbytes, _PROT_READ | _PROT_WRITE if access else _PROT_NONE), "mprotect")


def populate(address: int, nbytes: int) -> None:
    """Fills the page table of a shared mapping, and takes memory for it where there is none.

    By reading, which fills 16 entries at a time, all writable. Does nothing before Linux 5.14.
    """
    failed = _libc.madvise(address, nbytes, _MADV_POPULATE_READ)
    _check(failed and ctypes.get_errno() != errno.EINVAL, f"populating {nbytes} bytes")


def punch(fd: int, offset: int, nbytes: int) -> None:
    """Gives the memory of a part of a file back, in whatever process it is mapped. It reads as zeros afterwards."""
    _check(_libc.fallocate(fd, _FALLOC_PUNCH_HOLE | _FALLOC_KEEP_SIZE, offset, nbytes), f"fallocate of {nbytes} bytes")


def release(address: int, nbytes: int) -> None:
    """Gives address space back, with whatever is mapped in it."""
    _check(_libc.munmap(address, nbytes), "munmap")


def carry(source: int, destination: int, nbytes: int) -> bool:
    """Moves a shared mapping with its filled page tables, replacing what is mapped at the destination.

    The source stays mapped to the same file with empty page tables, so that at no moment another thread's mmap could
    get its place. False if the kernel cannot (before Linux 5.13, or the source is not one mapping); the
    destination's state is undefined then.
    """
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    return bool(_libc.mremap(source, nbytes, nbytes, flags, destination) == destination)


def copy_small(destination: int, source: int, nbytes: int) -> None:
    """Copies without letting other Python threads run. 0.3 µs and the time for the bytes."""
    _everything[destination : destination + nbytes] = _everything[source : source + nbytes]


def copy(destination: int, source: int, nbytes: int) -> None:
    """memcpy that lets other Python threads run. The ranges must not overlap."""
    _libc.memcpy(destination, source, nbytes)


def clear(address: int, nbytes: int) -> None:
    """Zeroes memory; lets other Python threads run."""
    _libc.memset(address, 0, nbytes)


def futex_wait(address: int, expected: int, timeout_ns: int) -> None:
    """Sleeps until woken, while the 32 bits at `address` are `expected`, at most `timeout_ns`. May wake for nothing."""
    timeout = _Timespec(timeout_ns // 1_000_000_000, timeout_ns % 1_000_000_000)
    _libc.syscall(_FUTEX, address, _FUTEX_WAIT, expected, ctypes.byref(timeout), None, 0)


def futex_wake(address: int) -> None:
    """Wakes every thread, of any process, that sleeps on `address`."""
    _libc.syscall(_FUTEX, address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)
