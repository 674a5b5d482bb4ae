"""The GPUs that this process may use: as the driver counts them, with what NVML knows besides."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from aegis.core.errors import UserError
from aegis.device.cuda.driver import CudaError, Driver

_NAME_BYTES, _BUS_ID_BYTES = 96, 32
_NVLINKS = 18  # that one GPU has at most


@dataclass(frozen=True, slots=True)
class VisibleGpu:
    """What is None is not known: there is no NVML, or it does not say."""

    ordinal: int
    name: str
    memory_bytes: int
    free_bytes: int | None = None
    pcie: tuple[int, int] | None = None  # the generation and the lanes of its link to the host
    nvlinks: int | None = None  # that are up


def visible(driver: Driver | None = None, nvml: Any = None) -> tuple[VisibleGpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES leaves, by ordinal. `nvml` stands in for `pynvml`.

    Raises UserError where there is none: no Python package, no driver, or no GPU.
    """
    driver = driver or Driver()
    try:
        driver("cuInit", 0)
        count = int(driver("cuDeviceGetCount"))
    except (OSError, RuntimeError) as error:  # the bindings raise the latter where there is no driver to load
        raise UserError(f"there is no usable GPU: {error}", param="device") from error
    if not count:
        raise UserError("there is no usable GPU: the driver shows none", param="device")
    nvml = _initialised(nvml)
    return tuple(_found(driver, nvml, ordinal) for ordinal in range(count))


def driver_version(nvml: Any = None) -> str | None:
    """None: NVML does not say."""
    nvml = _initialised(nvml)
    return _asked(nvml, "nvmlSystemGetDriverVersion") if nvml else None


def _found(driver: Driver, nvml: Any, ordinal: int) -> VisibleGpu:
    device = driver("cuDeviceGet", ordinal)
    name, memory_bytes = _text(driver("cuDeviceGetName", _NAME_BYTES, device)), int(driver("cuDeviceTotalMem", device))
    found = VisibleGpu(ordinal, name, memory_bytes)
    if nvml is None:
        return found
    try:  # NVML counts all GPUs of the machine, in an order of its own
        handle = nvml.nvmlDeviceGetHandleByPciBusId(_text(driver("cuDeviceGetPCIBusId", _BUS_ID_BYTES, device)))
    except (CudaError, nvml.NVMLError):
        return found
    memory = _asked(nvml, "nvmlDeviceGetMemoryInfo", handle)
    generation = _asked(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
    lanes = _asked(nvml, "nvmlDeviceGetMaxPcieLinkWidth", handle)
    links = [_asked(nvml, "nvmlDeviceGetNvLinkState", handle, link) for link in range(_NVLINKS)]
    return VisibleGpu(
        ordinal,
        name,
        memory_bytes,
        free_bytes=None if memory is None else min(int(memory.free), memory_bytes),
        pcie=(int(generation), int(lanes)) if generation and lanes else None,
        nvlinks=sum(bool(up) for up in links),
    )


def _initialised(nvml: Any) -> Any:
    """None where it is not installed, or has no driver."""
    try:
        nvml = nvml if nvml is not None else import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


def _asked(nvml: Any, name: str, *arguments: Any) -> Any:
    """None: it does not say."""
    try:
        return getattr(nvml, name)(*arguments)
    except nvml.NVMLError:
        return None


def _text(told: bytes | str) -> str:
    return told.split(b"\0", 1)[0].decode() if isinstance(told, bytes) else told
