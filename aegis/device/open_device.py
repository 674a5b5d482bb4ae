"""Devices by kind, `cpu` or `cuda`: the pool for the process that keeps the accounts, the device for each instance.

Only what the kind needs is imported.
"""

from __future__ import annotations

from collections.abc import Sequence

from aegis.core.errors import UserError
from aegis.device.protocol import Device, PhysicalPool
from aegis.device.shared_events import SharedWords


def create_pool(kind: str, nbytes: int, *, ordinal: int = 0) -> PhysicalPool:
    """The memory of one device, rounded down to pages; `ordinal` is its number among its kind.

    Raises UserError for any other kind, for less than a page and where the machine has no such device.
    """
    if kind == "cpu":
        from aegis.device.cpu.pool import CpuPool

        return CpuPool(nbytes)
    if kind == "cuda":
        from aegis.device.cuda.pool import CudaPool

        return CudaPool(nbytes, ordinal=ordinal)
    raise _unknown(kind)


def open_device(
    kind: str, pool_address: str, words: SharedWords, *, stream_words: Sequence[int] | None = None
) -> Device:
    """The device of this process, over the pool that another one has.

    Raises UserError for any other kind, if no process has that pool, and if the machine has no such device.
    """
    if kind == "cpu":
        from aegis.device.cpu.device import CpuDevice

        return CpuDevice(pool_address, words, stream_words=stream_words)
    if kind == "cuda":
        from aegis.device.cuda.device import CudaDevice

        return CudaDevice(pool_address, words, stream_words=stream_words)
    raise _unknown(kind)


def _unknown(kind: str) -> UserError:
    return UserError(f"unknown kind of device {kind!r}; there are cpu and cuda", param="device")
