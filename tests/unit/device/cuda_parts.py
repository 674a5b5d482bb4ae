"""A CUDA pool and devices over it, each with a model of the driver of its own, as in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aegis.core.ids import PageRun
from aegis.device.cuda.device import CudaDevice
from aegis.device.cuda.driver import Driver
from aegis.device.cuda.pool import CudaPool
from aegis.device.shared_events import SharedWords
from tests.unit.device.cuda_driver_model import DriverModel

PAGE = 2 << 20
LONG_NS = 60_000_000_000


@dataclass
class Rig:
    """One pool, and any number of devices that share it and the words. `next_model` makes the driver of each."""

    words: SharedWords
    pages: int = 16
    next_model: Callable[[], DriverModel] = DriverModel
    models: list[DriverModel] = field(default_factory=list)
    devices: list[CudaDevice] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool_model = DriverModel()
        self.pool: Any = CudaPool(self.pages * PAGE, driver=Driver(self.pool_model))

    def open(self, *, granted: Sequence[PageRun] = (), stream_words: Sequence[int] | None = None) -> CudaDevice:
        model = self.next_model()
        device = CudaDevice(self.pool.address, self.words, stream_words=stream_words, driver=Driver(model))
        self.models.append(model)
        self.devices.append(device)
        device.grant(list(granted))
        return device

    def close_pool(self) -> None:
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    def close(self) -> None:
        for device in self.devices:
            device.close()
        self.close_pool()
