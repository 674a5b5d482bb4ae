"""The enumerations and structures of NVIDIA's driver, as far as `tests.unit.device.cuda_driver_model` knows them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, IntFlag


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713


class CUmemAllocationType(IntEnum):
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(IntEnum):
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAllocationHandleType(IntEnum):
    CU_MEM_HANDLE_TYPE_NONE = 0
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1


class CUmemAccess_flags(IntEnum):
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemAllocationGranularity_flags(IntEnum):
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


class CUdevice_attribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_CLOCK_RATE = 13
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE = 36
    CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH = 37
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


class CUstream_flags(IntEnum):
    CU_STREAM_NON_BLOCKING = 1


class CUdevResourceType(IntEnum):
    CU_DEV_RESOURCE_TYPE_SM = 1


class CUgreenCtxCreate_flags(IntEnum):
    CU_GREEN_CTX_NONE = 0
    CU_GREEN_CTX_DEFAULT_STREAM = 1


class CUevent_flags(IntFlag):
    CU_EVENT_BLOCKING_SYNC = 1
    CU_EVENT_DISABLE_TIMING = 2


@dataclass
class Location:
    type: CUmemLocationType | None = None
    id: int = -1


@dataclass
class CUmemAllocationProp:
    type: CUmemAllocationType | None = None
    location: Location = field(default_factory=Location)
    requestedHandleTypes: CUmemAllocationHandleType = CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE


@dataclass
class CUmemAccessDesc:
    location: Location = field(default_factory=Location)
    flags: CUmemAccess_flags | None = None


@dataclass
class SmResource:
    smCount: int
    minSmPartitionSize: int = 0  # drivers before CUDA 13.1 tell neither
    smCoscheduledAlignment: int = 0


@dataclass(eq=False)
class CUdevResource:
    sm: SmResource
    taken: bool = False  # by a descriptor
