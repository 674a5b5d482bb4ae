"""The CUDA driver API as the CUDA device uses it. Written from the documentation of CUDA 13; not run on a GPU.

Every call goes through `Driver`, which raises what failed and counts the calls that would stop a whole device: serving
makes none.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from aegis.core.errors import UserError, install_advice

DEVICE_WIDE = frozenset(
    {
        "cuCtxDestroy",
        "cuCtxSynchronize",
        "cuMemAlloc",
        "cuMemFree",
        "cuMemFreeHost",
        "cuMemcpy",
        "cuMemcpyDtoD",
        "cuMemcpyDtoH",
        "cuMemcpyHtoD",
        "cuMemsetD8",
        "cuModuleUnload",
    }
)
"""Calls that wait for work of every stream of the context, by their documentation or in fact."""


class CudaError(OSError):
    """A driver call that failed, as a system call may; the message names call and reason."""


class Driver:
    """`cuda.bindings.driver` by the names of its calls, with error codes raised as `CudaError`.

    `api` stands in for the bindings where it is given.
    """

    def __init__(self, api: Any = None) -> None:
        self.api: Any = api if api is not None else _bindings()
        self.device_wide = 0

    def __call__(self, name: str, *arguments: Any) -> Any:
        values = self.all(name, *arguments)
        return values[0] if values else None

    def all(self, name: str, *arguments: Any) -> list[Any]:
        """Everything that the call returns behind its code."""
        if name in DEVICE_WIDE:
            self.device_wide += 1
        values: list[Any]
        code, *values = getattr(self.api, name)(*arguments)
        if code != self.api.CUresult.CUDA_SUCCESS:
            raise CudaError(f"{name}: {code.name}")
        return values


class Gpu:
    """One GPU of this machine, initialised but without a context, and what its memory is made with.

    Raises UserError if there is none.
    """

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.driver = driver
        self.ordinal = ordinal
        api = driver.api
        try:
            driver("cuInit", 0)
            self.device = driver("cuDeviceGet", ordinal)
        except (OSError, RuntimeError) as error:  # the bindings raise the latter where there is no driver to load
            raise UserError(f"there is no usable GPU {ordinal}: {error}", param="device") from error
        self.fd_type = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self.memory = api.CUmemAllocationProp()
        self.memory.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.memory.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.memory.location.id = ordinal
        self.memory.requestedHandleTypes = self.fd_type
        self.access = api.CUmemAccessDesc()
        self.access.location = self.memory.location
        self.access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def granularity(self) -> int:
        """The number of bytes of which sizes of physical memory are multiples."""
        least = self.driver.api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.driver("cuMemGetAllocationGranularity", self.memory, least))

    def attribute(self, name: str) -> int:
        """0 where the driver does not know it: clocks are not told everywhere."""
        attribute = getattr(self.driver.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        try:
            return 0 if attribute is None else int(self.driver("cuDeviceGetAttribute", attribute, self.device))
        except CudaError:
            return 0


class Context:
    """The GPU's primary context, the one that torch uses too. Current for the thread that made it."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        try:
            self._context = gpu.driver("cuDevicePrimaryCtxRetain", gpu.device)
        except OSError as error:
            raise UserError(f"GPU {gpu.ordinal} cannot be used: {error}", param="device") from error
        self.enter()

    def enter(self) -> None:
        """Makes it current for the calling thread."""
        self._gpu.driver("cuCtxSetCurrent", self._context)

    def close(self) -> None:
        self._gpu.driver("cuDevicePrimaryCtxRelease", self._gpu.device)


def _bindings() -> Any:
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise UserError(f"the cuda device needs cuda-bindings; {install_advice('cuda')}") from error
