"""Lanes of the CUDA device: green contexts, each with multiprocessors (SMs) and a stream of its own.

Written from the documentation of CUDA 13; not run on a GPU. A green context belongs to the primary context and shares
its memory, so weights and KV need no copy, and kernels that are launched to its stream find only its SMs. The driver
gives SMs in multiples that depend on the GPU; the first lane gets such a multiple, the second the rest. MuxWise divides
GPUs in this way (§3.2.1). Bandwidth is not divided: what runs beside each other still contends for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aegis.device.cuda.driver import CudaError, Driver, Gpu
from aegis.device.divisions import WHOLE, Shares, two_lanes

_LEAST_AND_STEP = {(9, 0): (8, 8), (8, 0): (4, 2), (0, 0): (2, 2)}
"""SMs of a green context, by the least compute capability, the newest first: from the documentation of
cuDevSmResourceSplitByCount, for drivers before CUDA 13.1, which do not tell."""


@dataclass(slots=True)
class GreenLane:
    """A `Lane`. Its stream is for kernels, not for copies of the device. Kernels go to it by its handle, whichever
    context is current."""

    share: int
    sms: int
    _driver: Driver
    _context: Any
    _stream: Any

    @property
    def threads(self) -> int:
        return 1

    @property
    def stream(self) -> int:
        return int(self._stream)

    def enter(self) -> None:
        """The SMs are the stream's, not the thread's."""

    def close(self) -> None:
        """Waits for what is in the stream."""
        self._driver("cuStreamSynchronize", self._stream)
        self._driver("cuStreamDestroy", self._stream)
        self._driver("cuGreenCtxDestroy", self._context)


class DividedGpu:
    """A GPU's multiprocessors, and the lanes made of them. The primary context is current."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._driver = gpu.driver
        self._resource = self._whole()
        self._first: Mapping[Shares, int] = {}
        self._made: tuple[Shares, ...] | None = None
        if self._resource is not None:
            least, step = self._measures()
            self._first = two_lanes(int(self._resource.sm.smCount), least=least, step=step)

    @property
    def partitions(self) -> tuple[Shares, ...]:
        """Those that the driver makes: asked for the first time, it is tried. An instance without lanes is better than
        one that fails in the middle of its work."""
        if self._made is None:
            self._made = tuple([shares for shares in self._first if self._makes(shares)])
        return (WHOLE, *self._made)

    def lanes(self, shares: Shares) -> tuple[GreenLane, ...]:
        """Raises KeyError if it is no division, CudaError if the driver refuses."""
        split, _, rest = self._driver.all("cuDevSmResourceSplitByCount", 1, self._resource, 0, self._first[shares])
        first = self._lane(shares[0], split[0])
        try:
            return first, self._lane(shares[1], rest)
        except CudaError:
            first.close()
            raise

    def _makes(self, shares: Shares) -> bool:
        try:
            for lane in self.lanes(shares):
                lane.close()
        except (AttributeError, CudaError, RuntimeError):
            return False
        return True

    def _whole(self) -> Any:
        """None where the driver knows no green contexts (before CUDA 12.5)."""
        kinds = getattr(self._driver.api, "CUdevResourceType", None)
        if kinds is None:
            return None
        try:
            return self._driver("cuDeviceGetDevResource", self._gpu.device, kinds.CU_DEV_RESOURCE_TYPE_SM)
        except (AttributeError, CudaError, RuntimeError):  # the bindings raise the latter for calls that are missing
            return None

    def _measures(self) -> tuple[int, int]:
        """The least number of SMs of a lane, and what numbers are multiples of."""
        sm = self._resource.sm
        least, step = getattr(sm, "minSmPartitionSize", 0), getattr(sm, "smCoscheduledAlignment", 0)
        if least and step:
            return int(least), int(step)
        capability = (
            self._gpu.attribute("COMPUTE_CAPABILITY_MAJOR"),
            self._gpu.attribute("COMPUTE_CAPABILITY_MINOR"),
        )
        return next(of for newest, of in _LEAST_AND_STEP.items() if capability >= newest)

    def _lane(self, share: int, resource: Any) -> GreenLane:
        api, driver = self._driver.api, self._driver
        descriptor = driver("cuDevResourceGenerateDesc", [resource], 1)
        flags = api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = driver("cuGreenCtxCreate", descriptor, self._gpu.device, flags)
        try:
            stream = driver("cuGreenCtxStreamCreate", context, api.CUstream_flags.CU_STREAM_NON_BLOCKING, 0)
        except CudaError:
            driver("cuGreenCtxDestroy", context)
            raise
        return GreenLane(share, int(resource.sm.smCount), driver, context, stream)
