"""A model of NVIDIA's driver for machines without a GPU: what `cuda.bindings.driver` does, by its documentation.

Handles of device memory are files in memory, an exported handle is a descriptor of one; streams are threads. It is
strict: what the documentation forbids or leaves undefined is an error here. A copy to or from device memory that is not
mapped with access breaks its stream (CUDA_ERROR_ILLEGAL_ADDRESS from then on).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from tests.unit.device.cuda_driver_types import (
    CUdevice_attribute,
    CUdevResource,
    CUdevResourceType,
    CUevent_flags,
    CUgreenCtxCreate_flags,
    CUmemAccess_flags,
    CUmemAccessDesc,
    CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType,
    CUmemAllocationProp,
    CUmemAllocationType,
    CUmemLocationType,
    CUresult,
    CUstream_flags,
    SmResource,
)

GRANULARITY = 2 << 20
MAPPED_OFFSET = 1 << 44
"""Device pointers of registered host memory differ from the host's by this: code that mixes them up fails."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_NORESERVE, _FIXED = 0x4000, 0x10


@dataclass(eq=False)
class GreenContext:
    resource: CUdevResource
    streams: list[Stream] = field(default_factory=list)


_MEMORY = "model-gpu-"


def _gpu_of(fd: int) -> int:
    """The GPU whose memory this is, in whatever process it was made."""
    name = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
    return int(name.partition(_MEMORY)[2].split()[0])


class Refused(Exception):
    def __init__(self, code: CUresult) -> None:
        self.code = code


def demand(condition: object, code: CUresult = CUresult.CUDA_ERROR_INVALID_VALUE) -> None:
    if not condition:
        raise Refused(code)


@dataclass(eq=False)
class Handle:
    fd: int
    nbytes: int
    shareable: bool
    released: bool = False


@dataclass(eq=False)
class Mapping:
    start: int
    stop: int
    gpu: int  # whose memory it is
    access: bool = False


@dataclass(eq=False)
class Event:
    done: threading.Event | None = None  # of the last recording; None: never recorded
    destroyed: bool = False


class Stream:
    def __init__(self, model: DriverModel) -> None:
        self.model = model
        self.error: CUresult | None = None
        self.work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.outstanding = 0
        self.lock = threading.Lock()
        self.destroyed = False
        threading.Thread(target=self._run, name="model stream", daemon=True).start()

    def __int__(self) -> int:
        return id(self)

    def put(self, work: Callable[[], None]) -> None:
        demand(not self.destroyed, CUresult.CUDA_ERROR_INVALID_HANDLE)
        if self.error:
            raise Refused(self.error)
        with self.lock:
            self.outstanding += 1
        self.work.put(work)

    def end(self) -> None:
        self.destroyed = True
        self.work.put(None)

    def _run(self) -> None:
        while (work := self.work.get()) is not None:
            try:
                if self.error is None:
                    work()
            except Refused as refusal:
                self.error = refusal.code
            with self.lock:
                self.outstanding -= 1


def call(*, context: bool = False) -> Callable[[Any], Any]:
    """A driver call: checks that the driver is initialised, and the thread has a context where the call needs one."""

    def wrap(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        def called(self: DriverModel, *arguments: Any) -> tuple[Any, ...]:
            self.calls[function.__name__] = self.calls.get(function.__name__, 0) + 1
            try:
                demand(self.initialised or function.__name__ == "cuInit", CUresult.CUDA_ERROR_NOT_INITIALIZED)
                if context:
                    current = getattr(self.current, "context", False)
                    demand(current and self.retained, CUresult.CUDA_ERROR_INVALID_CONTEXT)
                if self.passing.get(function.__name__, 0) > 0:
                    self.passing[function.__name__] -= 1
                elif self.failing.get(function.__name__, 0) > 0:
                    self.failing[function.__name__] -= 1
                    raise Refused(CUresult.CUDA_ERROR_OUT_OF_MEMORY)
                result = function(self, *arguments)
            except Refused as refusal:
                return (refusal.code, None)
            values = result if isinstance(result, tuple) else () if result is None else (result,)
            return (CUresult.CUDA_SUCCESS, *values)

        return called

    return wrap


class DriverModel:
    """One process's driver. `capacity_bytes` is what cuMemCreate can give; `failing` counts calls to refuse. There are
    `gpus`, of which this process uses one, `uses`, and `unreachable` are those without a link to it."""

    CUresult = CUresult
    CUmemAllocationProp = CUmemAllocationProp
    CUmemAllocationType = CUmemAllocationType
    CUmemLocationType = CUmemLocationType
    CUmemAllocationHandleType = CUmemAllocationHandleType
    CUmemAccessDesc = CUmemAccessDesc
    CUmemAccess_flags = CUmemAccess_flags
    CUdevice_attribute = CUdevice_attribute
    CUmemAllocationGranularity_flags = CUmemAllocationGranularity_flags
    CUstream_flags = CUstream_flags
    CUdevResourceType = CUdevResourceType
    CUgreenCtxCreate_flags = CUgreenCtxCreate_flags
    CUevent_flags = CUevent_flags
    CU_MEMHOSTREGISTER_PORTABLE = 1
    CU_MEMHOSTREGISTER_DEVICEMAP = 2
    CU_MEMHOSTREGISTER_READ_ONLY = 8

    def __init__(self, capacity_bytes: int = 1 << 40) -> None:
        self.capacity_bytes = capacity_bytes
        self.initialised = False
        self.retained = 0
        self.current = threading.local()
        self.handles: set[Handle] = set()
        self.created_bytes = 0
        self.reserved: dict[int, int] = {}  # nbytes by base
        self.mappings: dict[int, Mapping] = {}  # by start
        self.registered: dict[int, tuple[int, int]] = {}  # (nbytes, flags) by base
        self.streams: set[Stream] = set()
        self.events: set[Event] = set()
        self.green_contexts: set[GreenContext] = set()
        self.attributes: dict[CUdevice_attribute, int] = {}
        self.sms = SmResource(132)
        self.gpus, self.uses = 1, 0
        self.memory_bytes = 80 << 30  # of each GPU
        self.unreachable: set[int] = set()
        self.failing: dict[str, int] = {}
        self.passing: dict[str, int] = {}
        self.calls: dict[str, int] = {}
        self.copied: list[int] = []

    def fail(self, call: str, *, after: int) -> None:
        """One call is refused, when so many have been done."""
        self.passing[call], self.failing[call] = after, 1

    def held(self) -> dict[str, int]:
        """What has not been given back."""
        names = ("handles", "reserved", "mappings", "registered", "streams", "events", "green_contexts")
        return {name: len(getattr(self, name)) for name in names} | {"contexts": self.retained}

    # --- device and context

    @call()
    def cuInit(self, flags: int) -> None:
        demand(flags == 0)
        self.initialised = True

    @call()
    def cuDeviceGet(self, ordinal: int) -> int:
        demand(0 <= ordinal < self.gpus, CUresult.CUDA_ERROR_INVALID_DEVICE)
        return 7 + ordinal

    @call()
    def cuDeviceGetCount(self) -> int:
        demand(self.initialised)
        return self.gpus

    @call()
    def cuDeviceGetName(self, nbytes: int, device: int) -> bytes:
        demand(7 <= device < 7 + self.gpus, CUresult.CUDA_ERROR_INVALID_DEVICE)
        return f"Model {device - 7}".encode().ljust(nbytes, b"\0")

    @call()
    def cuDeviceTotalMem(self, device: int) -> int:
        demand(7 <= device < 7 + self.gpus, CUresult.CUDA_ERROR_INVALID_DEVICE)
        return self.memory_bytes

    @call()
    def cuDeviceGetPCIBusId(self, nbytes: int, device: int) -> bytes:
        demand(7 <= device < 7 + self.gpus, CUresult.CUDA_ERROR_INVALID_DEVICE)
        return f"0000:{device:02x}:00.0".encode().ljust(nbytes, b"\0")

    @call()
    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> int:
        demand(device == 7 + self.uses and device != peer, CUresult.CUDA_ERROR_INVALID_DEVICE)
        demand(7 <= peer < 7 + self.gpus, CUresult.CUDA_ERROR_INVALID_DEVICE)
        return int(peer - 7 not in self.unreachable)

    @call()
    def cuDeviceGetAttribute(self, attribute: CUdevice_attribute, device: int) -> int:
        demand(attribute in self.attributes)
        return self.attributes[attribute]

    @call()
    def cuDevicePrimaryCtxRetain(self, device: int) -> str:
        demand(device == 7 + self.uses, CUresult.CUDA_ERROR_INVALID_DEVICE)
        self.retained += 1
        return "primary"

    @call()
    def cuDevicePrimaryCtxRelease(self, device: int) -> None:
        demand(device == 7 + self.uses and self.retained, CUresult.CUDA_ERROR_INVALID_DEVICE)
        self.retained -= 1

    @call()
    def cuCtxSetCurrent(self, context: str) -> None:
        demand(context == "primary" and self.retained, CUresult.CUDA_ERROR_INVALID_CONTEXT)
        self.current.context = True

    # --- green contexts

    @call()
    def cuDeviceGetDevResource(self, device: int, kind: CUdevResourceType) -> CUdevResource:
        demand(device == 7 + self.uses, CUresult.CUDA_ERROR_INVALID_DEVICE)
        demand(kind == CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
        return CUdevResource(self.sms)

    @call()
    def cuDevSmResourceSplitByCount(
        self, groups: int, resource: CUdevResource, flags: int, least: int
    ) -> tuple[list[CUdevResource], int, CUdevResource]:
        """As the bindings return it: the groups, their number, the rest."""
        demand(groups == 1 and flags == 0 and resource.sm is self.sms and least > 0)
        step = self.sms.smCoscheduledAlignment or 8
        count = -(-max(least, self.sms.minSmPartitionSize or 8) // step) * step
        demand(count < self.sms.smCount)
        return [CUdevResource(SmResource(count))], 1, CUdevResource(SmResource(self.sms.smCount - count))

    @call()
    def cuDevResourceGenerateDesc(self, resources: list[CUdevResource], count: int) -> CUdevResource:
        demand(len(resources) == count == 1 and not resources[0].taken)
        resources[0].taken = True
        return resources[0]

    @call()
    def cuGreenCtxCreate(self, descriptor: CUdevResource, device: int, flags: CUgreenCtxCreate_flags) -> GreenContext:
        demand(device == 7 + self.uses and descriptor.taken and self.retained)
        demand(flags == CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
        context = GreenContext(descriptor)
        self.green_contexts.add(context)
        return context

    @call()
    def cuGreenCtxDestroy(self, context: GreenContext) -> None:
        demand(context in self.green_contexts, CUresult.CUDA_ERROR_INVALID_CONTEXT)
        demand(not any(stream in self.streams for stream in context.streams))  # else they would be detached
        self.green_contexts.remove(context)

    @call()
    def cuGreenCtxStreamCreate(self, context: GreenContext, flags: int, priority: int) -> Stream:
        demand(context in self.green_contexts, CUresult.CUDA_ERROR_INVALID_CONTEXT)
        demand(flags == CUstream_flags.CU_STREAM_NON_BLOCKING)
        stream = Stream(self)
        self.streams.add(stream)
        context.streams.append(stream)
        return stream

    # --- physical memory

    @call()
    def cuMemGetAllocationGranularity(self, prop: CUmemAllocationProp, option: int) -> int:
        self._check_prop(prop)
        return GRANULARITY

    @call()
    def cuMemCreate(self, nbytes: int, prop: CUmemAllocationProp, flags: int) -> Handle:
        self._check_prop(prop)
        demand(flags == 0 and nbytes > 0 and nbytes % GRANULARITY == 0)
        demand(self.created_bytes + nbytes <= self.capacity_bytes, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        self.created_bytes += nbytes
        fd = os.memfd_create(f"{_MEMORY}{self.uses}", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        shareable = prop.requestedHandleTypes == CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = Handle(fd, nbytes, shareable)
        self.handles.add(handle)
        return handle

    @call()
    def cuMemRelease(self, handle: Handle) -> None:
        demand(handle in self.handles)
        self.handles.remove(handle)
        handle.released = True
        os.close(handle.fd)

    @call()
    def cuMemExportToShareableHandle(self, handle: Handle, kind: CUmemAllocationHandleType, flags: int) -> int:
        demand(handle in self.handles and handle.shareable and flags == 0)
        demand(kind == CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return os.dup(handle.fd)

    @call()
    def cuMemImportFromShareableHandle(self, fd: int, kind: CUmemAllocationHandleType) -> Handle:
        demand(kind == CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        try:
            own = os.dup(fd)
        except OSError:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE) from None
        handle = Handle(own, os.fstat(own).st_size, True)
        self.handles.add(handle)
        return handle

    # --- virtual memory

    @call()
    def cuMemAddressReserve(self, nbytes: int, alignment: int, address: int, flags: int) -> int:
        demand(nbytes > 0 and nbytes % mmap.PAGESIZE == 0 and alignment & (alignment - 1) == 0)
        demand(address == 0 and flags == 0)
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        raw = _libc.mmap(None, nbytes + alignment, 0, private, -1, 0)
        demand(raw != ctypes.c_void_p(-1).value, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        base = int(-(-raw // max(alignment, 1)) * max(alignment, 1))
        _libc.munmap(raw, base - raw)
        _libc.munmap(base + nbytes, raw + alignment - base)
        self.reserved[base] = nbytes
        return base

    @call()
    def cuMemAddressFree(self, base: int, nbytes: int) -> None:
        demand(self.reserved.get(base) == nbytes)
        demand(not any(base <= start < base + nbytes for start in self.mappings))
        del self.reserved[base]
        _libc.munmap(base, nbytes)

    @call()
    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: Handle, flags: int) -> None:
        demand(handle in self.handles and offset == 0 and nbytes == handle.nbytes and flags == 0)
        demand(address % GRANULARITY == 0 and self._in_reservation(address, nbytes))
        demand(not any(each.start < address + nbytes and address < each.stop for each in self.mappings.values()))
        got = _libc.mmap(address, nbytes, 0, mmap.MAP_SHARED | _FIXED, handle.fd, 0)
        demand(got == address, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        self.mappings[address] = Mapping(address, address + nbytes, _gpu_of(handle.fd))

    @call()
    def cuMemSetAccess(self, address: int, nbytes: int, descriptors: list[CUmemAccessDesc], count: int) -> None:
        demand(len(descriptors) == count == 1 and descriptors[0].location.id == self.uses)
        demand(descriptors[0].flags == CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        whole = self._whole_mappings(address, nbytes)
        demand(not self.unreachable & {mapping.gpu for mapping in whole}, CUresult.CUDA_ERROR_INVALID_DEVICE)
        _libc.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        for mapping in whole:
            mapping.access = True

    @call()
    def cuMemUnmap(self, address: int, nbytes: int) -> None:
        for mapping in self._whole_mappings(address, nbytes):
            del self.mappings[mapping.start]
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE | _FIXED
        demand(_libc.mmap(address, nbytes, 0, private, -1, 0) == address)

    # --- host memory

    @call(context=True)
    def cuMemHostRegister(self, base: int, nbytes: int, flags: int) -> None:
        demand(nbytes > 0)
        overlaps = any(start < base + nbytes and base < start + size for start, (size, _) in self.registered.items())
        demand(not overlaps, CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        self.registered[base] = (nbytes, flags)

    @call(context=True)
    def cuMemHostUnregister(self, base: int) -> None:
        demand(base in self.registered, CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
        del self.registered[base]

    @call(context=True)
    def cuMemHostGetDevicePointer(self, base: int, flags: int) -> int:
        demand(flags == 0 and base in self.registered)
        demand(self.registered[base][1] & self.CU_MEMHOSTREGISTER_DEVICEMAP)
        return base + MAPPED_OFFSET

    # --- streams and events

    @call(context=True)
    def cuStreamCreate(self, flags: int) -> Stream:
        stream = Stream(self)
        self.streams.add(stream)
        return stream

    @call(context=True)
    def cuStreamDestroy(self, stream: Stream) -> None:
        demand(stream in self.streams, CUresult.CUDA_ERROR_INVALID_HANDLE)
        self.streams.remove(stream)
        stream.end()

    @call(context=True)
    def cuStreamQuery(self, stream: Stream) -> None:
        demand(stream in self.streams, CUresult.CUDA_ERROR_INVALID_HANDLE)
        if stream.error:
            raise Refused(stream.error)
        demand(stream.outstanding == 0, CUresult.CUDA_ERROR_NOT_READY)

    @call(context=True)
    def cuStreamSynchronize(self, stream: Stream) -> None:
        demand(stream in self.streams, CUresult.CUDA_ERROR_INVALID_HANDLE)
        done = threading.Event()
        stream.put(done.set)
        done.wait(60)

    @call(context=True)
    def cuMemcpyAsync(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        demand(destination and source and nbytes > 0)

        def copy() -> None:
            self._check_access(destination, nbytes)
            self._check_access(source, nbytes)
            ctypes.memmove(destination, source, nbytes)
            self.copied.append(nbytes)

        stream.put(copy)

    @call(context=True)
    def cuMemsetD8Async(self, destination: int, value: int, nbytes: int, stream: Stream) -> None:
        def fill() -> None:
            demand(self._in_reservation(destination, nbytes), CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
            self._check_access(destination, nbytes)
            ctypes.memset(destination, value, nbytes)

        stream.put(fill)

    @call(context=True)
    def cuStreamWriteValue64(self, stream: Stream, address: int, value: int, flags: int) -> None:
        cell = self._cell(address)

        def write() -> None:
            cell.value = value

        stream.put(write)

    @call(context=True)
    def cuEventCreate(self, flags: int) -> Event:
        event = Event()
        self.events.add(event)
        return event

    @call(context=True)
    def cuEventDestroy(self, event: Event) -> None:
        demand(event in self.events, CUresult.CUDA_ERROR_INVALID_HANDLE)
        self.events.remove(event)

    @call(context=True)
    def cuEventRecord(self, event: Event, stream: Stream) -> None:
        demand(event in self.events, CUresult.CUDA_ERROR_INVALID_HANDLE)
        event.done = done = threading.Event()
        stream.put(done.set)

    @call(context=True)
    def cuEventSynchronize(self, event: Event) -> None:
        demand(event in self.events, CUresult.CUDA_ERROR_INVALID_HANDLE)
        if event.done is not None:
            self._outlast(event.done)

    @call(context=True)
    def cuStreamWaitEvent(self, stream: Stream, event: Event, flags: int) -> None:
        demand(event in self.events and flags == 0, CUresult.CUDA_ERROR_INVALID_HANDLE)
        if (done := event.done) is not None:  # what it stands for now, whatever is recorded later
            stream.put(lambda: self._outlast(done))

    # --- checks

    def _outlast(self, done: threading.Event) -> None:
        while not done.wait(0.01):
            for stream in self.streams:
                if stream.error:
                    raise Refused(stream.error)

    def _check_prop(self, prop: CUmemAllocationProp) -> None:
        demand(prop.type == CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED)
        demand(prop.location.type == CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE and prop.location.id == self.uses)

    def _in_reservation(self, address: int, nbytes: int) -> bool:
        return any(base <= address and address + nbytes <= base + size for base, size in self.reserved.items())

    def _whole_mappings(self, address: int, nbytes: int) -> list[Mapping]:
        """Those that make up exactly these addresses: none missing, none split."""
        whole, at = [], address
        while at < address + nbytes:
            demand(at in self.mappings)
            whole.append(self.mappings[at])
            at = self.mappings[at].stop
        demand(nbytes > 0 and at == address + nbytes)
        return whole

    def _check_access(self, address: int, nbytes: int) -> None:
        """Device memory has to be mapped with access; anything else is the host's."""
        inside = [base for base, size in self.reserved.items() if base < address + nbytes and address < base + size]
        if not inside:
            return
        at = next((m.start for m in self.mappings.values() if m.start <= address < m.stop), None)
        while at is not None and at < address + nbytes:
            mapping = self.mappings.get(at)
            demand(mapping is not None and mapping.access, CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)
            at = mapping.stop if mapping else None
        demand(at is not None, CUresult.CUDA_ERROR_ILLEGAL_ADDRESS)

    def _cell(self, address: int) -> ctypes.c_uint64:
        host = address - MAPPED_OFFSET
        mapped = [(base, size) for base, (size, flags) in self.registered.items() if flags & 2]
        demand(address % 8 == 0 and any(base <= host and host + 8 <= base + size for base, size in mapped))
        return ctypes.c_uint64.from_address(host)
