"""Devices by name."""

from __future__ import annotations

from collections.abc import Sequence

from aegis.core.errors import UserError
from aegis.device.base import Device
from aegis.device.shared_words import SharedWords


def open_device(
    kind: str, memory_bytes: int, words: SharedWords, *, stream_words: Sequence[int] | None = None
) -> Device:
    """The device of this process, `cpu` or `cuda`. Only what the kind needs is imported.

    Raises UserError for any other kind and where the machine has no such device.
    """
    if kind == "cpu":
        from aegis.device.cpu import CpuDevice

        return CpuDevice(memory_bytes, words, stream_words=stream_words)
    if kind == "cuda":
        from aegis.device.cuda import CudaDevice

        return CudaDevice(memory_bytes, words, stream_words=stream_words)
    raise UserError(f"unknown kind of device {kind!r}; there are cpu and cuda", param="device")
